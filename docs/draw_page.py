"""Take a picture of parts of a page that `shardline report` or `shardline explain --html` wrote, in Chromium.

shardline train --preset moe-demo --nproc 4 --parallelism.pipeline_parallel_degree=2 \\
    --parallelism.expert_parallel_degree=2 --training.steps 40 --validation.enable --validation.freq 10 \\
    --metrics.log_freq 1 --job.dump_folder outputs/moe-demo
shardline report outputs/moe-demo
python docs/draw_page.py docs/report.png outputs/moe-demo/report.html Loss "Learning rate" "Gradient norm" \\
    "Where a step goes" "Actions of step"

shardline explain --preset moe-demo --world-size 8 --html --parallelism.pipeline_parallel_degree=2 \\
    --parallelism.tensor_parallel_degree=2 --parallelism.context_parallel_degree=2 \\
    --parallelism.expert_parallel_degree=4
python docs/draw_page.py docs/explain.png explain.html --alone "Pieces of each parameter"
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
KEEP = """titles => {
  const named = figure => titles.some(title => figure.querySelector("h3").textContent.startsWith(title));
  document.querySelectorAll("figure").forEach(figure => { if (!named(figure)) figure.remove(); });
  document.querySelectorAll("section").forEach(one => { if (!one.querySelector("figure")) one.remove(); });
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("titles", nargs="+", help="how the titles of the charts begin")
    parser.add_argument("--alone", action="store_true", help="the first of these charts, without the rest of the page")
    parser.add_argument("--width", type=int, default=1180)
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": options.width, "height": 900}, color_scheme="light")
        page.goto(options.page.resolve().as_uri())
        page.wait_for_selector("figure .plot *")
        page.evaluate(KEEP, options.titles)
        page.wait_for_timeout(300)
        if options.alone:
            page.locator("figure").first.screenshot(path=options.picture)
        else:
            page.screenshot(path=options.picture, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
