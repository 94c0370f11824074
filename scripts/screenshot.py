"""Takes a picture of a page in the system's Chromium, for the documents.

.venv/bin/python scripts/screenshot.py report.html docs/images/report-dark.png --dark
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SIZE = {"width": 1080, "height": 1500}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    browser_path = shutil.which("chromium")
    if browser_path is None:
        sys.exit("found no chromium; run scripts/system-browser.sh")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as runner:
        browser = runner.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE, color_scheme="dark" if options.dark else "light")
        tab.goto(options.page.resolve().as_uri())
        tab.screenshot(path=options.picture)
        browser.close()


if __name__ == "__main__":
    main()
