"""Tables for spreadsheets: CSV that Excel, LibreOffice and pandas read alike.

    cells = pandas.read_csv("predictions.csv", keep_default_na=False)

It is UTF-8 with a byte order mark: without one Excel takes it for the system's old code page, and
pandas drops it. A text that a spreadsheet would compute as a formula gets an apostrophe in front,
and so does one that begins with an apostrophe: to take one away gives each name back. Numbers have
a decimal point.
"""

import csv
import io
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ddp_mnist.system.console import Console, write_stdout
from ddp_mnist.system.text import finite

MARK = "\ufeff"  # the byte order mark
# Of OWASP's "CSV injection", with the wide signs that Excel takes in East Asia
COMPUTED = re.compile("[=+@\t\r\n\uff1d\uff0b\uff0d\uff20'-]")


def line_of(cells: Sequence[Any]) -> str:
    """Return a row as a line of CSV (RFC 4180); None, NaN and infinity are empty cells."""
    harmless = [
        f"'{cell}" if isinstance(cell, str) and COMPUTED.match(cell) else cell
        for cell in finite(cells)
    ]
    csv.writer(written := io.StringIO()).writerow(harmless)
    return written.getvalue()


def to_bytes(rows: Iterable[Sequence[Any]], is_first: bool = True) -> bytes:
    """Return a file of these rows, or what follows in it; bytes of a name not in UTF-8 escaped."""
    text = (MARK if is_first else "") + "".join(map(line_of, rows))
    return text.encode(errors="backslashreplace")


def print_row(console: Console, row: Sequence[Any], is_first: bool) -> None:
    """Print a row, as `Console.print` does a line.

    On a terminal the mark is left out, and what would control it is escaped.
    """
    if sys.stdout.isatty():
        console.print(line_of(row).removesuffix("\r\n"))
    elif console.verbose:
        content = to_bytes([row], is_first)
        console.verbose = write_stdout(lambda: sys.stdout.buffer.write(content))
