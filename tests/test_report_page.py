"""The HTML report in a real browser: plots and tables are there, in a wide window and in a narrow one."""

import json
import os
import re
import shutil
import subprocess

import pytest

from titan_mega_moe import report
from titan_mega_moe.report import Run, Step

# Written into the page's own title once it is complete.
MEASURE = """<script>addEventListener('load', () => {
  const rows = id => document.querySelectorAll('#' + id + ' tbody tr').length
  const images = [...document.images]
  document.title = JSON.stringify({
    images: images.map(i => [i.alt, i.naturalWidth, i.getBoundingClientRect().right]),
    rows: Object.fromEntries(['summary', 'split', 'gradients', 'steps', 'settings'].map(id => [id, rows(id)])),
    width: innerWidth, page: document.documentElement.scrollWidth,
    verdict: document.querySelector('.verdict').innerText, bad: !!document.querySelector('.verdict.bad'),
  })
})</script>"""


@pytest.fixture(scope="module")
def chromium():
    if shutil.which("chromium") is None and shutil.which("apt-get") and os.geteuid() == 0:
        quiet = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120"]
        subprocess.run([*quiet, "update"], capture_output=True, timeout=180)
        subprocess.run([*quiet, "install", "chromium"], capture_output=True, timeout=300)
    return shutil.which("chromium") or pytest.skip("no chromium here, and apt-get cannot install it")


def a_run(name, seconds, split):
    steps = [Step(i, 5 - i / 10, 1.0, seconds, 10.0, 1.0, 0.5, 0.0, 2.0 + i / 9, 1.1) for i in range(1, 41)]
    gradients = {1: {f"layers.{i}.moe.routed_experts.inner_experts.w1_EFD": [1.0, 0.5, -0.5] for i in range(20)}}
    return Run(name, steps, gradients=gradients, time_split=split)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    split = {"dispatch": 10.0, "experts": 50.0, "other": 30.0, "idle": 10.0}
    runs = a_run("mega_moe", 0.5, split), a_run("upstream", 1.0, split)
    report.write(folder, runs[0], [runs[1]], 1e-2, {"file": "/a/path/" + "long/" * 60, "note": "<b>&"}, 0.1)
    text = (folder / "report.html").read_text()
    (folder / "measured.html").write_text(text.replace("</html>", MEASURE + "</html>"))
    return folder / "measured.html"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [1200, 500])
def test_plots_and_tables_are_there_and_fit(chromium, page, width, tmp_path):
    quiet = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
    command = [chromium, "--headless", *quiet.split(), "--disable-sync", f"--user-data-dir={tmp_path}"]
    done = subprocess.run(
        [*command, f"--window-size={width},900", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stderr[-2000:]
    seen = json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert [alt for alt, *_ in seen["images"]] == ["Loss", "Step time", "Where the time went", "Expert load"]
    assert all(natural > 500 and right <= seen["width"] for _, natural, right in seen["images"])
    assert seen["rows"] == {"summary": 2, "split": 2, "gradients": 12, "steps": 40, "settings": 2}
    assert seen["page"] <= seen["width"]  # wide tables scroll by themselves
    assert not seen["bad"] and "2.00 times as fast as upstream" in seen["verdict"]
