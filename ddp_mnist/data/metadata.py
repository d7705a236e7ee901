"""Metadata files: tables next to images, with a row for the label or the numbers of each image."""

import codecs
import contextlib
import csv
import io
import itertools
import json
import os
import re
import reprlib
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ddp_mnist.config.image_options import ImageOptions, folded
from ddp_mnist.data.groups import COLUMN, name_in
from ddp_mnist.data.listing import (
    LABELS,
    SPLIT_OF,
    SPLIT_WORDS,
    Check,
    check_cells,
    is_number,
    label_check,
    number_check,
)
from ddp_mnist.errors import DataError, blame
from ddp_mnist.system.files import regular
from ddp_mnist.system.text import joined, shown_name

MOST_READ = 2**22  # bytes of a table that is no metadata file, of which only the columns are told
LEAD = re.compile(r"(sep=(.)\r?\n)?([ \t]*\r?\n)*")  # Excel's own first line, and blank ones
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+")
THOUSANDS = re.compile(r"[1-9][0-9]{0,2}[.,][0-9]{3}")  # or a decimal number


@dataclass
class Table:
    """The rows of a file, each with its place, e.g. `line 7`; at None, cells without a column."""

    columns: list[str]
    rows: list[tuple[str, dict[Any, Any]]]
    separator: str = ","

    def column(self, at: str, *names: str) -> str | None:
        """Return the column of the first of these names that there is, in whatever case it is."""
        for name in names:
            same = [each for each in self.columns if folded(each) == folded(name)]
            same = [each for each in same if each == name] or same
            if len(same) > 1:
                raise DataError(f"{at}: has several columns {', '.join(same)}; keep one")
            if same:
                return same[0]
        return None


class Described(NamedTuple):
    """What metadata says of an image."""

    target: Any  # its label, or its numbers
    split: str  # "" if there is no column for it
    group: str  # "" as well, or if its cell is empty


OTHERS = ("split", COLUMN)  # uses of columns, which no table needs
WORDS = ("labels", "splits", "groups")  # for each of these


def is_name(cell: Any) -> bool:
    return isinstance(cell, str) and bool(cell.strip())


def split_in_cell(cell: Any) -> str:
    """Return the split that a cell means; "" if none."""
    return SPLIT_OF.get(str(cell).strip().lower(), "")


def is_filled(cell: str | list[str] | None) -> bool:
    """Return whether a cell, or one of those without a column, holds anything."""
    return any(map(str.strip, [cell] if isinstance(cell, str) else cell or ()))


def is_empty(cells: str) -> bool:
    return not cells.strip(" ,;\t")


def file_check(column: str) -> Check:
    return is_name, f"no name in column {column}", "name a file, or delete these rows"


def split_check(column: str) -> Check:
    fix = f"write {', '.join(SPLIT_WORDS)} in each, or leave the column out"
    return lambda cell: bool(split_in_cell(cell)), f"no split in column {column}", fix


NO_MORE: Check = (is_empty, "more cells than columns", "quote cells that hold the separator")


def read_text(path: Path, at: str) -> str:
    """Return the text of a file of UTF-8, or with a mark of UTF-16. Raise DataError for others."""
    content, text = regular(path).read_bytes(), ""
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_wide else "utf-8-sig")
        start = text.find("\0")  # as in UTF-16 without its mark
    except UnicodeDecodeError as error:
        start = error.start
    if start < 0:
        return text
    line, fix = 1 + content.count(b"\n", 0, start), "save it as UTF-8 (in Excel: CSV UTF-8)"
    raise DataError(f"{at}: line {line} has letters in another encoding; {fix}")


def read_csv(path: Path, at: str, file_name: str = "file_name") -> Table:
    """Read columns separated by comma, semicolon or tab: that next to `file_name` in the heading,
    or else that which it has most of.
    """
    text = read_text(path, at)
    lead: Any = LEAD.match(text)
    text, skipped = text[lead.end() :], lead[0].count("\n")
    heading = re.sub('"[^"]*"', "", text.partition("\n")[0])
    named = (x for x in ",;\t" if folded(file_name) in map(str.strip, folded(heading).split(x)))
    separator = lead[2] or next(named, max(",;\t", key=heading.count))
    csv.field_size_limit(2**31 - 1)  # a column that nobody asked for may hold anything
    opened = io.StringIO(text, newline="")
    reader = csv.DictReader(opened, delimiter=separator, skipinitialspace=True, strict=True)
    reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or ()]
    rows = list[tuple[str, dict[Any, Any]]]()
    try:
        for row in reader:  # whose cells may hold line breaks
            within = sum(str(cell).count("\n") for cell in row.values())
            rows.append((f"line {skipped + reader.line_num - within}", row))
    except csv.Error as error:
        fault = f"line {skipped + reader.reader.line_num}: {error}"
        raise DataError(f"{at}: {fault}; close each quote, and double those within") from error
    rows = [each for each in rows if any(map(is_filled, each[1].values()))]
    return Table(columns, rows, separator)


def read_jsonl(path: Path, at: str, *_: str) -> Table:
    """Read one JSON object a line."""
    rows = list[tuple[str, dict[str, Any]]]()
    for number, line in enumerate(read_text(path, at).split("\n"), start=1):
        try:
            row, why = json.loads(line if line.strip() else "{}"), "it is not an object"
        except json.JSONDecodeError as error:
            row, why = None, f"{error.msg} in column {error.colno}"
        if not isinstance(row, dict):
            fix = 'give one {"file_name": ..., "label": ...} a line'
            raise DataError(f"{at}: line {number} is {reprlib.repr(line)} ({why}); {fix}")
        rows += [(f"line {number}", row)] * bool(row)
    return Table([*dict.fromkeys(name for _, row in rows for name in row)], rows)


def read_parquet(path: Path, *_: str) -> Table:
    table = import_module("pyarrow.parquet").read_table(regular(path))
    return Table(table.column_names, [(f"row {n}", row) for n, row in enumerate(table.to_pylist())])


READERS: dict[str, Callable[..., Table]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}


def is_metadata(file: Path) -> bool:
    """Return whether a file describes the images next to it."""
    return file.stem.lower() == "metadata" and file.suffix.lower() in READERS


def read_metadata(
    typed: str, folder: str, paths: list[Path], options: ImageOptions
) -> tuple[dict[Path, Described], list[str]]:
    """Return how a metadata file describes each image, and notes on files that describe none.

    Labels are as they stand there: 007 in a CSV file is a word, and so is NA. With options.numbers,
    it is the numbers of these columns instead. Raise DataError for bad rows, or if these columns
    are missing, and as `own_columns`.
    """
    numbers, needed = bool(options.numbers), ("file_name", *(options.numbers or ("label",)))
    found, notes, known = dict[Path, Described](), list[str](), frozenset(paths)
    file_name = dict(options.columns).get("file_name", "file_name")
    for file in filter(is_metadata, paths):
        with blame(at := f"{typed}: {file}", DataError):
            table = READERS[file.suffix.lower()](Path(folder, file), at, file_name)
            if not table.rows:
                notes.append(f"{file} has no rows, and was not used")
                continue
            columns = find_columns(table, at, str(file), needed, options)
            if missing := [use for use in needed if not columns[use]]:
                notes.append(f"{file} {lack_of(table, missing)}")
                continue
            wanted = [str(columns[use]) for use in needed]
            split, group = (None if columns[use] in wanted else columns[use] for use in OTHERS)
            names, targets = cells_of(table, at, wanted, numbers)
            if not group and COLUMN not in needed:
                notes += unused_columns(file, table, {*wanted, split})
            splits = cells_of_more(table, at, split, split_check)
            groups = map(name_in, cells_of_more(table, at, group))
            rows = map(Described, targets, map(split_in_cell, splits), groups)
            for name, row, (place, _) in zip(names, rows, table.rows, strict=True):
                image = path_of(name, file.parent, folder, known)
                before = found.setdefault(image, row)
                for what, one, other in zip(WORDS, before, row, strict=True):
                    if one != other:
                        both = f"{str(one) or 'none'} and {str(other) or 'none'}"
                        fault = f"{image} has the {what} {both}"
                        raise DataError(f"{at}: {place}: {fault}; decide on one")
    words = [row.target for row in found.values()]
    if all(isinstance(each, str) and re.fullmatch("0|[1-9][0-9]*", each) for each in words):
        found = {image: row._replace(target=int(row.target)) for image, row in found.items()}
    if numbers and not found:
        named = ", ".join(dict(options.columns).get(use, use) for use in needed)
        fault = f"{typed}: holds no metadata.csv with the columns {named}"
        fix = "add what is missing" if notes else "add one"
        raise DataError("; ".join([fault, *notes, *other_tables(folder, paths), fix]))
    return found, notes


def find_columns(
    table: Table, at: str, name: str, needed: tuple[str, ...], options: ImageOptions
) -> dict[str, str | None]:
    """Return the column for each use, None if the table has none. Raise as `own_columns`."""
    own = options.own_columns(name, table.columns, needed, OTHERS)
    usual = {"label": LABELS} if not options.numbers else {}
    names_of = {use: usual.get(use, (use,)) for use in (*OTHERS, *needed)}
    names_of |= {use: (column,) for use, column in own.items()}
    return {use: table.column(at, *names) for use, names in names_of.items()}


def lack_of(table: Table, missing: list[str]) -> str:
    """Return the fault of a table that is not used, and how to name columns that it may have."""
    there, named = joined(map(repr, table.columns), 120), [f"{use}=ITS_NAME" for use in missing]
    fault = f"has no column {' and '.join(missing)}, only {there}, and was not used"
    return f"{fault} (if called otherwise, give train --columns {','.join(named)})"


def unused_columns(file: Path, table: Table, used: Collection[str | None]) -> list[str]:
    """Return a note on columns that say the same of two images or more on average, as groups do."""
    others = {*table.columns}.difference(used)
    cells = {name: {str(row.get(name)) for _, row in table.rows} for name in others}
    repeat = [n for n in table.columns if 1 < len(cells.get(n, ())) <= len(table.rows) / 2]
    fix = f"if one tells which images belong together, give train --columns {COLUMN}=ITS_NAME"
    shown = f"{file}: columns not used: {joined(map(repr, repeat), 80)}; {fix}"
    return [shown] if repeat else []


def cells_of_more(
    table: Table, at: str, column: str | None, check: Callable[[str], Check] | None = None
) -> list[Any]:
    """Return the cells of a column that need not be there: all None then.

    Raise DataError for cells that do not pass the check.
    """
    if column is None:
        return [None] * len(table.rows)
    cells = [row.get(column) for _, row in table.rows]
    if check:
        check_cells(at, cells, check(column), [place for place, _ in table.rows])
    return cells


def cells_of(
    table: Table, at: str, columns: list[str], are_numbers: bool
) -> tuple[list[str], list[Any]]:
    """Return the names of files, from the first of the columns, and the label or the numbers of
    each from the others. Raise DataError, which counts bad cells.
    """
    places, rows = [place for place, _ in table.rows], [row for _, row in table.rows]
    surplus = [table.separator.join(row.get(None, ())) for row in rows]
    check_cells(at, surplus, NO_MORE, places)
    names, *found = ([row.get(column) for row in rows] for column in columns)
    check_cells(at, names, file_check(columns[0]), places)
    for n, (column, cells) in enumerate(zip(columns[1:], found, strict=True)):
        found[n] = cells = [x.strip() if isinstance(x, str) else x for x in cells]
        if are_numbers:
            found[n] = with_points(cells, table.separator)
            few = table.separator == ";" and sum(map(has_point, cells))
            if few and few < sum(map(has_comma, cells)):
                what = f"a number with a point in column {column}, where others have a comma"
                one_sign = (lambda x: not has_point(x), what, "write them all alike")
                check_cells(at, cells, one_sign, places)
            if table.separator != "," and may_be_thousands(cells):
                what = f"a number in column {column} that may be in thousands or a decimal one"
                fix = "write whole numbers without a sign, and decimals with one in each row"
                check_cells(
                    at, cells, (lambda x: not THOUSANDS.fullmatch(str(x)), what, fix), places
                )
        check_cells(at, found[n], (number_check if are_numbers else label_check)(column), places)
    return [*map(str, names)], [*zip(*found, strict=True)] if are_numbers else found[0]


def with_points(cells: list[Any], separator: str) -> list[Any]:
    """Return numbers with a decimal point, if they have a comma and are not separated by one.

    A program writes both as its country does. In a column that has points too, or where tabs
    separate and each comma may be that of a thousand, commas are left, and then refused.
    """
    with_comma = {*filter(has_comma, cells)}
    is_unclear = separator == "\t" and all(re.search(",...$", x) for x in with_comma)
    if separator == "," or is_unclear or any(map(has_point, cells)):
        return cells
    return [x.replace(",", ".") if x in with_comma else x for x in cells]


def may_be_thousands(cells: list[Any]) -> bool:
    """Return whether numbers from 1,000 on, and none below, may have a sign before each thousand.

    Those with a sign have three digits after it, and there are whole ones below 1,000.
    """
    signed = [cell for cell in cells if has_comma(cell) or has_point(cell)]
    is_whole = any(re.fullmatch(r"\d{1,3}", str(cell)) for cell in cells)
    return bool(signed) and is_whole and all(THOUSANDS.fullmatch(x) for x in signed)


def has_comma(cell: Any) -> bool:
    return bool(DECIMAL_COMMA.fullmatch(str(cell)))


def has_point(cell: Any) -> bool:
    return "." in str(cell) and is_number(cell)


def path_of(name: str, beside: Path, folder: str, known: Collection[Path]) -> Path:
    """Return the path of an image, relative to the folder if it lies in it.

    It is in the spelling of the file that is there: accents may be composed in two ways, tables
    add blanks at the ends, and Windows writes backslashes. `known` are paths in the folder, which
    need no look.
    """
    typed = (name, name.strip(), name.strip().replace("\\", "/"))
    forms = (unicodedata.normalize(f, x) for x in typed for f in ("NFC", "NFD"))
    paths = (within(folder, beside / each) for each in itertools.chain(typed, forms))
    there = (x for x in paths if x in known or os.path.exists(Path(folder, x)))  # noqa: PTH110 # raises nothing
    return next(there, None) or within(folder, beside / name)


def within(folder: str, path: Path) -> Path:
    """Return a path without `..`, and relative to the folder if it lies in it."""
    path = Path(os.path.normpath(path))
    if is_outside(path):
        whole = Path(os.path.realpath(Path(folder, path.parent)), path.name)
        return whole.relative_to(folder) if whole.is_relative_to(folder) else path
    return path


def is_outside(path: Path) -> bool:
    """Return whether a path that is relative to a folder, without `..` within, leads out of it."""
    return path.is_absolute() or path.parts[:1] == ("..",)


def other_tables(folder: str, paths: list[Path]) -> list[str]:
    """Return a note on the first tables with another name, which may describe the images."""
    beside = {p.with_suffix("") for p in paths if p.suffix and p.suffix.lower() not in READERS}
    tables = [p for p in paths if p.suffix.lower() in READERS and p.with_suffix("") not in beside]
    tables.sort(key=lambda path: (len(path.parts), path))
    named = list[str]()
    for file in [path for path in tables if not is_metadata(path)][:3]:
        name = shown_name(str(file))
        if Path(folder, file).stat().st_size > MOST_READ:
            named.append(f"{name} is a table")
            continue
        with contextlib.suppress(DataError), blame(name, DataError):  # what it holds is not asked
            columns = READERS[file.suffix.lower()](Path(folder, file), name).columns
            named.append(f"{name} has the columns {joined(map(repr, columns), 80)}")
    fix = "a table of the images is called metadata.csv, and has the columns file_name and label"
    fix += ", or says which they are: train --columns"
    return [*named, fix] if named else []
