"""Read a Parquet file in a process of limited memory: `agents.program MODULE FILE`.

A few kilobytes of Parquet can unpack to many gigabytes, and pyarrow allocates them before any check
is possible. So a child with limited memory unpacks the file and sends JSON lines: first one about
columns, then lists of rows. A child that runs out of memory is an error of the file; its reader
survives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agents.errors import ExpectedError
from agents.program import command
from agents.shared.data.columns import BYTES, CALL_KEYS, KNOWN_KEYS, TOOL_KEYS
from agents.shared.data.files import MAX_LINE_CHARS
from agents.shared.data.meaning import find_kind
from agents.shared.files.python_child import SAFE_FOLDER, python_environ
from agents.state import archive_path
from agents.trainer.data.turns.tool_calls import without_nulls

MEMORY_BYTES = 768 << 20
"""Memory that the child may take in addition to its libraries, in bytes."""
_MODULE = "agents.trainer.data.parquet_reader"
_BLOCK_BYTES = 1 << 20
_ROWS_AT_ONCE = 256
_BATCH_BYTES = 16 << 20
_SENT_BYTES = 4 << 20
# Texts compress to a third or a tenth; a file that unpacks to far more is an attack on memory.
_MAX_UNPACKED_BYTES = 256 << 20
_MAX_UNPACKED_TIMES = 200
_LEAST_ROW_BYTES = 16
_LONG_ROW = f"the row is longer than {MAX_LINE_CHARS:,} characters"
_TOO_LARGE = "Write it again with smaller row groups and pages, or as .jsonl"


class UnreadColumn(tuple[str, str, int, bool]):
    """Meaning, name, number of non-empty rows, and whether the column makes the data unusable."""

    __slots__ = ()


def read_parquet(
    path: Path, columns: list[UnreadColumn], memory_bytes: int | None = None
) -> Iterator[tuple[Any, float]]:
    """Yield each row, or ValueError for a broken one, with the fraction read so far.

    Args:
        path: the file.
        columns: list that receives the unread columns before the first row.
        memory_bytes: memory for unpacking, in bytes; `MEMORY_BYTES` if None.

    Raises:
        ExpectedError: the file cannot be read, or unpacks to more than its size justifies.
    """
    memory_bytes = memory_bytes or MEMORY_BYTES
    environ = {
        **python_environ(os.environ, archive_path()),
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve memory, which would count
        # Each thread's stack and arena would count against the limit.
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command(sys.executable, _MODULE, str(path.absolute()), str(memory_bytes)),
            cwd=SAFE_FOLDER,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert child.stdout is not None
        try:
            is_ended = False
            for line in child.stdout:
                said = json.loads(line)
                if "failed" in said:
                    raise ExpectedError(*said["failed"])
                columns += [UnreadColumn(column) for column in said.get("columns", ())]
                is_ended = said.get("ended", False)
                for is_row, value in said.get("rows", ()):
                    yield (value if is_row else ValueError(value)), said["share"]
            if not is_ended:  # killed by the limit in a library that cannot handle it
                raise _too_large(path, memory_bytes)
        finally:
            # The reader may stop early, while the child still writes.
            child.kill()
            child.stdout.close()
            child.wait()


def _too_large(path: Path, memory_bytes: int) -> ExpectedError:
    return ExpectedError(
        f"{path} takes more than {memory_bytes >> 20} MB of memory to unpack.", _TOO_LARGE
    )


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate `num_bytes` more; beyond that it raises MemoryError.

    Linux only: other systems do not report the current size; there nothing is limited.
    """
    import resource

    try:
        # The sixth field is the size of data and stack in pages, which RLIMIT_DATA counts. Reserved
        # address space does not count: allocators reserve much for each of many threads.
        taken = int(Path("/proc/self/statm").read_text("ascii").split()[5])
    except (OSError, ValueError):
        return
    limit = taken * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


# ---------------------------------------------------------------- in the child


def main(argv: list[str]) -> int:
    """Send the rows of a file; return the exit code."""
    path, memory_bytes = Path(argv[0]), int(argv[1])
    try:
        _send_rows(path, memory_bytes)
    except ExpectedError as error:
        _send(failed=[error.message, error.hint])
    return 0


def _send(**fields: Any) -> None:
    print(json.dumps(fields, default=_plain), flush=True)


def _plain(value: Any) -> Any:
    """Return values without a JSON form as texts, and bytes as their length."""
    return {BYTES: len(value)} if isinstance(value, (bytes, bytearray)) else str(value)


def _send_rows(path: Path, memory_bytes: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    limit_memory(memory_bytes)
    try:
        # With pre_buffer a whole row group would be in memory, possibly the whole file.
        with pq.ParquetFile(path, buffer_size=_BLOCK_BYTES, pre_buffer=False) as file:
            _refuse_claims(path, file.metadata)
            names = _choose_columns(path, file)
            _send(columns=_list_unread(file, names))
            _send_batches(path, file, names)
    except (pa.ArrowMemoryError, MemoryError) as error:
        raise _too_large(path, memory_bytes) from error
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        words = str(error).strip().splitlines()[0][:400]
        raise ExpectedError(
            f"{path} is not a complete Parquet file: {words}", "Write it again"
        ) from error
    _send(ended=True)


def _refuse_claims(path: Path, metadata: Any) -> None:
    """Reject a file that claims more rows than its bytes can hold."""
    if metadata.num_rows * _LEAST_ROW_BYTES > _most_unpacked(path):
        raise ExpectedError(
            f"{path} claims {metadata.num_rows:,} rows in {path.stat().st_size:,} bytes.",
            "Check where it is from: texts do not compress to that extent",
        )


def _most_unpacked(path: Path) -> int:
    return _MAX_UNPACKED_BYTES + _MAX_UNPACKED_TIMES * path.stat().st_size


def _choose_columns(path: Path, file: Any) -> list[str]:
    """Return the columns to read: all but files, and lists of numbers."""
    names = file.schema_arrow.names
    doubled = [name for name, count in Counter(names).items() if count > 1 and name in KNOWN_KEYS]
    if doubled:
        raise ExpectedError(
            f"{path} has more than one column '{doubled[0]}'.",
            "Rename all but one of them: a row has one text of a name. Nothing was trained",
        )
    # Numbers may be embeddings, far larger than the texts; known names say what they rate.
    read = [
        field.name
        for field in file.schema_arrow
        if names.count(field.name) == 1
        and not _holds_bytes(field.type)
        and not (_holds_numbers(field.type) and find_kind(field.name).kind == "unknown")
    ]
    if not read and file.metadata.num_rows:
        raise ExpectedError(
            f"{path} has no column to learn from; it has {names}.",
            "Name a file with texts or messages; tokens and files are not trained",
        )
    return read


def _holds_numbers(kind: Any) -> bool:
    """Return whether a column holds lists of numbers."""
    import pyarrow as pa

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(kind) for is_kind in kinds):
        return False
    return bool(pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type))


def _holds_bytes(kind: Any) -> bool:
    """Return whether a column holds files, such as the pictures of the datasets library."""
    import pyarrow as pa

    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return any(_holds_bytes(kind.field(place).type) for place in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _list_unread(file: Any, names: Sequence[str]) -> list[tuple[str, str, int, bool]]:
    """Return the other columns with the number of their rows that are not null."""
    left = [field for field in file.schema_arrow if field.name not in names]
    found = []
    for field in left:
        count = _count_held(file.metadata, field.name)
        is_named = find_kind(field.name).kind == "media" or field.type.num_fields > 0
        is_file = _holds_bytes(field.type) and is_named
        if count:
            found.append(("media" if is_file else "unknown", field.name, count, is_file))
    return found


def _count_held(metadata: Any, name: str) -> int:
    """Return the number of non-null rows of a column, by the statistics of its first leaf."""
    held = 0
    for group in (metadata.row_group(place) for place in range(metadata.num_row_groups)):
        for place in range(group.num_columns):
            column = group.column(place)
            if column.path_in_schema.split(".")[0] != name:
                continue
            known = column.statistics
            nulls = known.null_count if known is not None and known.has_null_count else 0
            held += min(group.num_rows, column.num_values - nulls)
            break
    return max(0, held)


def _send_batches(path: Path, file: Any, names: list[str]) -> None:
    total, sent_rows, sent_bytes = file.metadata.num_rows, 0, 0
    most = _most_unpacked(path)
    of_tools = [
        field.name
        for field in file.schema_arrow
        if field.name in TOOL_KEYS or any(f"{key}:" in str(field.type) for key in CALL_KEYS)
    ]
    for batch in file.iter_batches(batch_size=_choose_batch(file.metadata), columns=names):
        step = max(1, batch.num_rows * _SENT_BYTES // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, step):
            # Only a slice as Python objects: they take many times the bytes of the batch.
            values = _list_values(batch.slice(start, step))
            rows = [_wrap(_without_nulls(row, of_tools) if of_tools else row) for row in values]
            sent_rows += len(rows)
            sent_bytes += sum(len(row) for row in rows)
            if sent_bytes > most:
                raise ExpectedError(
                    f"{path} unpacks to more than {sent_bytes >> 20} MB from "
                    f"{path.stat().st_size:,} bytes.",
                    "Check where it is from: texts do not compress to that extent",
                )
            share = sent_rows / max(1, total)
            print(f'{{"share": {share}, "rows": [{",".join(rows)}]}}', flush=True)


def _choose_batch(metadata: Any) -> int:
    """Return the number of rows that are unpacked at once: fewer for long rows."""
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    row_bytes = max(
        (group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0
    )
    return max(1, min(_ROWS_AT_ONCE, int(_BATCH_BYTES / max(1.0, row_bytes))))


def _without_nulls(row: Any, names: Sequence[str]) -> Any:
    """Return a row without the null fields in some columns, which a table has for each tool."""
    if not isinstance(row, dict):
        return row
    return {**row, **{name: without_nulls(row[name]) for name in names if name in row}}


def _wrap(row: Any) -> str:
    if isinstance(row, ValueError):
        return json.dumps([False, str(row)])
    text = json.dumps([True, row], default=_plain)
    return text if len(text) <= 2 * MAX_LINE_CHARS else json.dumps([False, _LONG_ROW])


def _list_values(batch: Any) -> list[Any]:
    """Return the rows of a batch, with an error in place of a row with invalid text."""
    try:
        rows: list[Any] = batch.to_pylist()
        return rows
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [ValueError(f"byte 0x{error.object[error.start]:02x} is not UTF-8")]
    # pyarrow fails for the whole batch, so the row is located by halving it.
    halves = (batch.slice(0, batch.num_rows // 2), batch.slice(batch.num_rows // 2))
    return [row for half in halves for row in _list_values(half)]
