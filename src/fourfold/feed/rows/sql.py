"""`ff.sql`: the rows of a query as a source."""

from collections.abc import Mapping, Sequence

from fourfold.feed.rows.columns import Columns
from fourfold.feed.rows.source import RowSource
from fourfold.feed.rows.sql_databases import open_database
from fourfold.words import argument_checks
from fourfold.words.errors import DataError


def sql(
    url: str,
    query: str,
    *,
    key: str,
    target: str | None = None,
    arrays: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    index: str | None = None,
) -> RowSource:
    """The rows of a query as a source for `ff.Feed` and `ff.Data`.

    url     sqlite:///FILE, or postgresql://USER@HOST:PORT/NAME (pip install 'fourfold[postgres]')
    query   one SELECT
    key     its column that is different in each row; whole numbers or text
    target  a column: samples are pairs (the other columns, target), instead of dicts. With one other column, the
            inputs are its values
    arrays  by binary column: the dtype and shape of its arrays, such as {"image": ("uint8", (3, 32, 32))}. A binary
            column without an entry holds the bytes of .npy files, or is an array of bytes; nothing is unpickled
    index   a folder for the keys and the digests of all rows, which are read once; it may be shared by ranks, and kept
            for a run that resumes. None: a temporary one for this process

    Raises DataError for a query that cannot be read, and for keys that are not unique.
    """
    problems = argument_checks.str_problems("url", url, attempt=f"sqlite:///{url}")
    problems += argument_checks.str_problems("query", query, attempt="its text, such as Path.read_text()")
    problems += argument_checks.str_problems("key", key)
    problems += argument_checks.str_problems("target", target, optional=True)
    problems += argument_checks.mapping_problems("arrays", arrays, optional=True)
    problems += argument_checks.str_problems("index", index, optional=True, path=True)
    if problems:
        raise DataError(problems, where="ff.sql")
    database = open_database(url, query, key)
    columns = Columns(database.columns, key=key, target=target, arrays=arrays or {})
    return RowSource(database, columns, of=f"{' '.join(query.split())} by {key}, {database.url}", index=index)
