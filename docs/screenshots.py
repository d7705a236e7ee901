"""This program makes the two pictures of the README, light and dark, from a run and a check:

    ddp-mnist doctor --save doctor.json
    python docs/screenshots.py runs/latest/report.html doctor.json

It writes figures/report.*.png and figures/doctor.*.png. What a picture has no room for is left out;
nothing is added. It needs Chromium (`CHROMIUM=/path` names it) and Pillow.
"""

import json
import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from PIL import Image

FIGURES = Path(__file__).parent / "figures"
WIDTH, HEIGHT = 480, 668
SCHEMES = {"dark": 0, "light": 1}  # as Chromium counts them
CHECKS = (
    *("packages", "GPUs", "cores", "memory", "main port", "rendezvous", "same"),
    *("collectives", "speed", "training"),
)

REPORT = """
html { border: 1px solid var(--faint); height: 100vh; box-sizing: border-box; overflow: hidden; }
main, header { padding: 0 12px; } header { padding-top: 8px; }
nav, header p, .headline ~ p, h2, h3, h3 + .scroll, caption { display: none; }
.headline { grid-template-columns: 1fr 1fr 1fr; gap: 8px; margin: 8px 0; }
.headline div { padding: 4px 8px; } .headline dt { font-size: 12px; }
.headline dd small { font-size: 10px; letter-spacing: -.3px; white-space: nowrap; }
.headline dd { font-size: 19px; line-height: 1.3; }
.curves { grid-template-columns: 1fr 1fr; gap: 12px; margin: 12px 0 0; }
.curves svg { overflow: visible; } .curves text { font-size: 11px !important; }
.curves > :nth-child(n+3), .mistakes li:nth-child(n+6), .mistakes .soft { display: none; }
.confusion { width: 100%; } .confusion td, .confusion th { padding: 1px 2px; font-size: 12px; }
#mistakes ~ * { display: none; }
.mistakes { grid-template-columns: repeat(5, 1fr); gap: 8px; margin: 8px 0; }
.mistakes li { font-size: 12px; line-height: 1.2; padding: 5px; }
"""
DOCTOR = """
html { border: 1px solid var(--faint); height: 100vh; box-sizing: border-box; overflow: hidden; }
:root { --faint: #d1d9e0; --paper: #fff; --ink: #1f2328;
  --PASS: #116329; --WARN: #9a6700; --FAIL: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --faint: #3d444d; --paper: #0d1117; --ink: #e6edf3;
    --PASS: #3fb950; --WARN: #d29922; --FAIL: #ff7b72; }
}
body { margin: 0; padding: 14px 12px; background: var(--paper); color: var(--ink);
  font: 13px/1.42 "DejaVu Sans Mono", monospace; }
p { margin: 0; padding-left: 19ch; text-indent: -19ch; white-space: pre-wrap; }
.fix { padding-left: 22ch; text-indent: -3ch; } b { color: var(--c); }
"""


def doctor_page(saved: Path) -> str:
    """Return what doctor said, as in a terminal, of the checks that are shown."""
    said = json.loads(saved.read_text())
    lines = ["<p>$ make doctor</p>"]
    for finding in said["findings"]:
        status, name, text, fix = (finding[k] for k in ("status", "name", "text", "fix"))
        if name in CHECKS or status != "PASS":
            mark = f'<b style="--c: var(--{status})">{status}</b>'
            lines.append(f"<p>{mark}  {name:13}{escape(text)}</p>")
            lines += [f'<p class="fix">-> {escape(fix)}</p>'] if fix else []
    verdict = said["verdict"]
    lines.append(f'<p>verdict: <b style="--c: var(--{verdict})">{verdict}</b></p>')
    return f"<!doctype html><meta charset=utf-8><style>{DOCTOR}</style>{''.join(lines)}"


def shoot(name: str, html: str) -> None:
    """Write a page's picture for each colour scheme, in 128 colours."""
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        page.write_text(html)
        for scheme, number in SCHEMES.items():
            options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shot}")
            size = ("--force-device-scale-factor=2", f"--window-size={WIDTH},{HEIGHT}")
            prefers = f"--blink-settings=preferredColorScheme={number}"
            browser = os.environ.get("CHROMIUM", "chromium")
            command = [browser, *options, *size, prefers, page.as_uri()]
            subprocess.run(command, check=True, capture_output=True)
            picture = Image.open(shot).convert("RGB").quantize(128, dither=Image.Dither.NONE)
            picture.save(FIGURES / f"{name}.{scheme}.png", optimize=True)


if __name__ == "__main__":
    report, doctor = map(Path, sys.argv[1:])
    shoot("report", report.read_text().replace("</style>", f"{REPORT}</style>", 1))
    shoot("doctor", doctor_page(doctor))
