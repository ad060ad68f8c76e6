"""The page, opened in a browser and driven: cursor, flame graph, folding, sorting, theme; hostile names do no harm."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.samples import HOSTILE, MiB, make_rehearsal
from understudy.report.page import MOST_SAMPLES, Block, Page, Sample, choose_samples, make_frame

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: pages are not opened")


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    record: dict[str, object] = json.loads(found[1])
    return record


def drive(page: str, script: str, folder: Path) -> dict[str, object]:
    """Open the page, run a script that fills the object `seen`, and return it."""
    assert BROWSER is not None
    code = (
        "<pre id='seen'></pre><script>const seen = {}; const key = (k, o) => dispatchEvent(new KeyboardEvent('keydown', "
        "{key: k, ...o})); const click = (e) => e.dispatchEvent(new MouseEvent('click')); "
        f"{script}; document.getElementById('seen').textContent = JSON.stringify(seen);</script></body>"
    )
    file = folder / "page.html"
    file.write_text(page.replace("</body>", code), encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom",
        "--disable-background-networking", "--disable-sync", "--virtual-time-budget=2000", file.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[-2000:]
    seen: dict[str, object] = json.loads(html.unescape(found[1]))
    return seen


SCRIPT = r"""
  const texts = (s) => [...document.querySelectorAll(s)].map((e) => e.textContent);
  seen.ready = document.documentElement.dataset.ready;
  seen.headline = document.getElementById('headline').textContent; seen.verdict = document.getElementById('headline').className;
  seen.at_peak = document.getElementById('alive').textContent;
  key('ArrowLeft'); seen.before = document.querySelector('#alive b').textContent;
  key('p'); seen.back = document.querySelector('#alive b').textContent;
  key('ArrowRight', {shiftKey: true}); seen.after = document.querySelector('#alive b').textContent;
  seen.by_module = texts('#flame button'); key('l'); seen.by_line = texts('#flame button');
  click(document.querySelectorAll('#flame button')[1]); seen.zoomed = texts('#flame button')[0]; key('Escape'); seen.whole = texts('#flame button')[0];
  const rows = () => [...document.querySelectorAll('#table-0 tbody tr')].map((r) => r.firstChild.textContent);
  seen.layers = rows(); click(document.querySelector('#table-0 td.fold')); seen.folded = rows(); click(document.querySelector('#table-0 td.fold'));
  const sizes = () => [...document.querySelectorAll('#table-1 tbody tr')].map((r) => r.children[2].textContent);
  const title = document.querySelectorAll('#table-1 th')[2]; click(title); seen.down = sizes(); seen.sort = title.getAttribute('aria-sort'); click(title); seen.up = sizes();
  const colour = () => getComputedStyle(document.body).backgroundColor;
  seen.colour = colour(); key('t'); seen.other = colour(); click(document.getElementById('theme')); seen.again = colour();
  seen.title = document.title; seen.images = document.images.length; seen.scripts = document.scripts.length;
"""


@in_browser
def test_the_page_is_driven(tmp_path: Path) -> None:
    rehearsal = make_rehearsal(extra=9 * MiB)
    seen = drive(rehearsal.to_html("train.py"), SCRIPT, tmp_path)
    assert seen["ready"] == "1"
    assert seen["headline"] == rehearsal.headline
    assert seen["verdict"] == "verdict fits"
    assert "operator 51, step 2, backward: 37.00 MiB" in str(seen["at_peak"])
    assert "9.00 MiBactivationsheadmodel.py:99" in str(seen["at_peak"])
    assert "operator 48," in str(seen["before"])
    assert "operator 51," in str(seen["back"])
    assert "operator 81," in str(seen["after"])
    boxes = seen["by_module"]
    assert isinstance(boxes, list)
    assert boxes[0] == "all  37.00 MiB"
    assert "layers  28.00 MiB" in boxes and "*  28.00 MiB" in boxes and "head  9.00 MiB" in boxes
    assert "model.py:5  16.00 MiB" in str(seen["by_line"])
    assert seen["zoomed"] == "model.py  37.00 MiB"
    assert seen["whole"] == "all  37.00 MiB"
    assert seen["layers"] == ["▾ Model", "▾ layers", "▸ 0..3 (Block x4)", "head (model.py)"]
    assert seen["folded"] == ["▸ Model"]
    assert seen["sort"] == "descending"
    down = seen["down"]
    assert isinstance(down, list) and down[0] == "16.00 MiB"
    up = seen["up"]
    assert isinstance(up, list) and (up[0], up[-1]) == ("4.00 MiB", "16.00 MiB")
    assert seen["colour"] != seen["other"]
    assert seen["colour"] == seen["again"]


@in_browser
def test_hostile_names_do_no_harm(tmp_path: Path) -> None:
    seen = drive(make_rehearsal(name=HOSTILE, extra=MiB).to_html(HOSTILE), SCRIPT, tmp_path)
    assert seen["ready"] == "1"
    assert str(seen["title"]).startswith(HOSTILE[:80])
    assert seen["images"] == 0
    assert seen["scripts"] == 4
    assert HOSTILE in str(seen["headline"])


def test_names_are_escaped_in_the_file() -> None:
    page = make_rehearsal(name=HOSTILE).to_html(HOSTILE)
    assert page.count("<script") == 3
    assert "<img" not in page
    assert "onerror=&quot;" in page or "onerror=\\" in page
    assert HOSTILE in json.dumps(data_of(page), ensure_ascii=False).replace('\\"', '"').replace(
        "\\u001b", "\x1b"
    )


def test_nothing_is_loaded() -> None:
    page = make_rehearsal().to_html()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page


def test_a_step_of_a_large_model_is_small() -> None:
    count = 400_000
    samples = [Sample(f"operator {i}", (i % 1000, 5)) for i in range(count)]
    blocks = [
        Block(i, i + 1000, i, 0, f"layers.{i % 126}.mlp.down_proj", f"model.py:{i % 300}")
        for i in range(0, count, 4)
    ]
    page = Page(
        "t",
        "h",
        categories=("a", "b"),
        samples=samples,
        blocks=blocks,
        peak=999,
        marks=((0, "one"), (200_000, "two")),
    )
    text = page.to_html()
    assert len(text) < 3_000_000
    data = data_of(text)
    kept = data["samples"]
    assert isinstance(kept, list)
    assert len(kept) <= MOST_SAMPLES + 3
    assert kept[int(str(data["peak"]))] == ["operator 999", [999, 5]]


def test_the_highest_samples_are_kept() -> None:
    totals = [0] * 10_000
    totals[1234] = 7
    totals[9876] = 9
    kept = choose_samples(totals, peak=9876, most=100)
    assert {0, 1234, 9876, 9999} <= set(kept)
    assert len(kept) <= 103
    assert choose_samples([1, 2, 3], 1) == [0, 1, 2]


def test_a_notebook_shows_it_in_a_frame() -> None:
    frame = make_rehearsal(name=HOSTILE)._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.count("<") == 2
    assert 'sandbox="allow-scripts"' in make_frame("")
