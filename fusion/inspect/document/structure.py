"""Defines the structure of a report as JSON, which `Explanation.json()` returns and the page of a report shows.

`VERSION` changes if a field is renamed or removed or gets another meaning, not if one is added.  Bytes, microseconds
and additions are of one call of the program.  A number that names an entry of a list is its position there; `None`
stands for an unknown value.
"""

from __future__ import annotations

from typing_extensions import TypedDict

VERSION = 1
"""The version of the structure."""


class SourcePlace(TypedDict):
    """A place in the program: the operation, its module, and the line `file:line`; `file` is an entry of `files`."""

    operation: str
    module: str
    file: int | None
    line: int | None
    text: str


class Excerpt(TypedDict):
    """Consecutive lines of a file, the first of which has the number `first`."""

    first: int
    lines: list[str]


class SourceFile(TypedDict):
    """A file of the program: all of it, or the surroundings of the lines that operations come from."""

    name: str
    path: str
    excerpts: list[Excerpt]


class Artefact(TypedDict):
    """An intermediate form of a kernel, from the target's tools; `lines` has the source line of each line of `text`.

    A line is 0 where none is known.
    """

    stage: str
    text: str
    lines: list[int]


class KernelEntry(TypedDict):
    """A kernel, with all of its launches, as pairs of a graph and a step of it.

    `program` is the block program; `failed` says why artefacts are missing.
    """

    name: str
    target: str
    source: str
    program: str
    launches: list[list[int]]
    artefacts: list[Artefact]
    failed: str


class PriceEntry(TypedDict):
    """Predicted microseconds of one launch, by part; `bound` names the longest part."""

    launch: float
    memory: float
    products: float
    scalars: float
    hidden: float
    epilogue: float
    bound: str


class OperationEntry(TypedDict):
    """An operation of the lowered graph; `steps` are the steps that compute it, none for a view."""

    name: str
    kind: str
    text: str
    place: SourcePlace
    reads: list[str]
    writes: list[str]
    bytes_read: int
    bytes_written: int
    steps: list[int]


class StepEntry(TypedDict):
    """A launch (`kernel` is an entry of `kernels`) or a call of the library (`reason` says why it is one).

    `params` are the tensors of a kernel's parameters, in order.  `lines` are, for each line of the kernel's source, the
    operations from which the line may come; empty if only `operations` is known.  `remedy` is a change that would allow
    to generate the call.
    """

    kind: str
    name: str
    kernel: int | None
    reason: str
    remedy: str
    place: SourcePlace
    operations: list[int]
    lines: list[list[int]]
    reads: list[str]
    writes: list[str]
    params: list[str]
    runs: int
    bytes_read: int
    bytes_written: int
    flops: int
    predicted: float | None
    measured: float | None
    price: PriceEntry | None


class RefusalEntry(TypedDict):
    """An edge that was not fused: the reason, a remedy, and the cost.

    `producer` and `consumer` are tensors; `from_step` and `to_step` the steps at the ends of the edge.
    """

    producer: str
    consumer: str
    reason: str
    remedy: str
    place: SourcePlace
    bytes: int
    microseconds: float
    from_step: int | None
    to_step: int | None


class TrialEntry(TypedDict):
    """An alternative with its times in microseconds; `refused` says why it may not win."""

    name: str
    predicted: float | None
    measured: float | None
    refused: str


class TuningEntry(TypedDict):
    """The alternatives for one subject; `chosen` is the winner, `reason` says why nothing was timed."""

    subject: str
    trials: list[TrialEntry]
    chosen: int
    reason: str


class CountedNames(TypedDict):
    """Counts parts of a graph, and names the first of them."""

    count: int
    names: list[str]


class PassEntry(TypedDict):
    """A pass of the compilation: its time, and the parts of the graph that it added, removed and edited."""

    stage: str
    name: str
    milliseconds: float
    changed: bool | None
    added: CountedNames
    removed: CountedNames
    edited: CountedNames


class DeviceEntry(TypedDict):
    """The figures of the device from which times are predicted, in bytes and operations per microsecond.

    `bandwidth` has pairs: the bytes that a launch touches, and bytes per microsecond.  `matrix_shares` has pairs: the
    bytes of an operand's element, and the speed of products relative to `matrix_flops`.
    """

    name: str
    launch_us: float
    bandwidth: list[list[float]]
    flops: float
    matrix_flops: float
    matrix_shares: list[list[float]]


class TrafficEntry(TypedDict):
    """Bytes read and written."""

    read: int
    written: int


class BreakEntry(TypedDict):
    """A place at which the program leaves its graphs; `whole`: a whole function is left to eager."""

    reason: str
    place: SourcePlace
    whole: bool


class GraphEntry(TypedDict):
    """A graph: its operations before fusion, its steps after, and how it was compiled.

    `failure` says why it runs eagerly, if it does.
    """

    label: str
    failure: str
    notes: list[str]
    traffic_before: TrafficEntry
    traffic_after: TrafficEntry
    memory_before: list[int]
    memory_after: list[int]
    device: DeviceEntry | None
    operations: list[OperationEntry]
    steps: list[StepEntry]
    refusals: list[RefusalEntry]
    tunings: list[TuningEntry]
    passes: list[PassEntry]
    graph_break: BreakEntry | None


class ValueEntry(TypedDict):
    """A result, gradient, or changed input or buffer, compared with eager and float64."""

    name: str
    agrees: bool
    text: str


class CertifiedEntry(TypedDict):
    """A tensor that a launch wrote on the user's inputs.

    `error` is against float64 on its own operands, `rounding` the part that its dtypes explain, `contribution` the
    change of `result` if the launch were exact: all relative, by norms, and None where infinite.
    """

    kernel: str
    tensor: str
    origins: list[str]
    error: float | None
    rounding: float | None
    right: bool
    contribution: float | None
    result: str


class CheckEntry(TypedDict):
    """A rewrite ("stage/pass"), or a kernel as it was built ("build/generate"), on hostile inputs.

    `tried` names their kinds, `faults` those on which results change; `reason` says why it was not checked.
    """

    name: str
    origins: list[str]
    tried: list[str]
    faults: list[str]
    reason: str


class CertificateEntry(TypedDict):
    """Lists the checks of the compiled program."""

    holds: bool
    values: list[ValueEntry]
    note: str
    launches: list[CertifiedEntry]
    checks: list[CheckEntry]


class FindingEntry(TypedDict):
    """The outcome of a command beyond the reports: its name, whether all is well, and the text that it prints."""

    command: str
    good: bool
    text: str


class Document(TypedDict):
    """A report.  Equal kernels are one entry of `kernels`, whichever graph launches them."""

    version: int
    fusion: str
    graphs: list[GraphEntry]
    kernels: list[KernelEntry]
    files: list[SourceFile]
    other_breaks: list[BreakEntry]
    certificate: CertificateEntry | None
    finding: FindingEntry | None
