"""Opens a page in Chromium without a display, runs scripts in it, and prints what they return and what went wrong.

    python browser.py report.html 'go("graph", 0, "after")' …

Output: a JSON object with `messages`, those that the page wrote to the console, and `results`.  It needs
PyQt6-WebEngine.
"""

from __future__ import annotations

import json
import os
import sys

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage
from PyQt6.QtWidgets import QApplication

PAUSE = 300
"""Milliseconds between scripts."""
PATIENCE = 60_000
"""Milliseconds until the page is given up."""


class Page(QWebEnginePage):
    """A page that keeps what is written to its console."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def javaScriptConsoleMessage(self, level: object, message: str, line: int, source: str) -> None:  # noqa: N802
        """Keep a message."""
        self.messages.append(f"{message} ({line})")


def main(path: str, *scripts: str) -> None:
    """Open a file, run scripts in it, and print results and messages."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QTWEBENGINE_DISABLE_SANDBOX"] = "1"  # as root there is none
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--disable-gpu"
    application, page = QApplication(["browser"]), Page()
    results: list[object] = []

    def run() -> None:
        if len(results) == len(scripts):
            application.quit()
        else:
            page.runJavaScript(scripts[len(results)], done)

    def done(result: object) -> None:
        results.append(result)
        QTimer.singleShot(PAUSE, run)

    page.loadFinished.connect(lambda ok: QTimer.singleShot(PAUSE, run))
    page.setUrl(QUrl.fromLocalFile(path))
    QTimer.singleShot(PATIENCE, application.quit)
    application.exec()
    print(json.dumps({"messages": page.messages, "results": results}))
    sys.stdout.flush()
    os._exit(0)  # Chromium's processes may keep the interpreter waiting


if __name__ == "__main__":
    main(*sys.argv[1:])
