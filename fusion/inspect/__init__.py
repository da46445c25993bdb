"""Shows compilations: `report`, graph `breaks`, dumps (`trace`), `accuracy` of kernels, `progress` of commands."""
