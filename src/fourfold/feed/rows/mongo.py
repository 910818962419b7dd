"""`ff.mongo`: the documents of a MongoDB collection as a source.

document  a row: the fields that are named, in this order
file      an object id in a field other than the key is that of a GridFS file, and stands for its content
Law: nothing is written: a pipeline with $out or $merge is rejected.
"""

import importlib
import itertools
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fourfold.feed.optional_package import import_optional
from fourfold.feed.rows.database import (
    OPENING,
    Columns,
    Connections,
    Row,
    check_columns,
    retried,
)
from fourfold.feed.rows.source import RowSource
from fourfold.feed.staging.origin import without_password
from fourfold.feed.unpacked import check_batch_fits
from fourfold.words import argument_checks
from fourfold.words.errors import DataError, Problem, first_line

TIMEOUT_MS = 10_000
ROWS_TOGETHER = 8  # whose files of GridFS are read by one query
WRITING_STAGES = ("$out", "$merge")
OBJECT_ID = re.compile("[0-9a-f]{24}")


def mongo(
    url: str,
    collection: str,
    fields: Sequence[str],
    *,
    key: str = "_id",
    pipeline: Sequence[Mapping[str, Any]] = (),
    target: str | None = None,
    arrays: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    index: str | None = None,
) -> RowSource:
    """The documents of a collection as a source for `ff.Feed` and `ff.Data` (pip install 'fourfold[mongo]').

    url         mongodb://USER@HOST/DATABASE
    fields      of a sample; every document must have them: numbers, text, binary data, lists of numbers, or ids of
                files in GridFS, whose content takes the place of the id
    key         a field that is different in each document: object ids, whole numbers or text
    pipeline    stages of an aggregation that documents pass first; it cannot write
    target, arrays, index   as in `ff.sql`

    Raises DataError for what cannot be read, and for keys that are not unique.
    """
    problems = argument_checks.str_problems("url", url)
    problems += argument_checks.str_problems("collection", collection)
    problems += argument_checks.name_list_problems("fields", fields)
    problems += argument_checks.str_problems("key", key)
    problems += argument_checks.str_problems("target", target, optional=True)
    problems += argument_checks.mapping_problems("arrays", arrays, optional=True)
    problems += argument_checks.str_problems("index", index, optional=True, path=True)
    if problems:
        raise DataError(problems, where="ff.mongo")
    database = MongoDatabase(url, collection, fields, key=key, pipeline=pipeline)
    columns = Columns(database.columns, key=key, target=target, arrays=arrays or {})
    described = f"{collection}, {list(pipeline)}, {list(fields)} by {key}, {database.url}"
    return RowSource(database, columns, of=described, index=index)


class MongoDatabase:
    """A collection, by pymongo."""

    def __init__(
        self,
        url: str,
        collection: str,
        fields: Sequence[str],
        *,
        key: str,
        pipeline: Sequence[Mapping[str, Any]],
    ) -> None:
        self.url, self._given, self._collection = without_password(url), url, collection
        self._key, self._pipeline = key, [dict(stage) for stage in pipeline]
        self.columns = check_columns([key, *(name for name in fields if name != key)], key, where="ff.mongo")
        self._check_arguments()
        self.connections = Connections()
        retried(self, self._check_server, OPENING)
        self._object_id = importlib.import_module("bson").ObjectId

    @property
    def _pymongo(self) -> Any:
        return import_optional("pymongo", "pymongo, for mongodb://", "mongo", where="ff.mongo")

    def _check_server(self) -> None:
        """Raise DataError for a URL without a database, and for fields that no document has."""
        try:
            if self._database() is None:
                raise DataError(Problem(self.url, "a URL that ends in /DATABASE"), where="ff.mongo")
            self._database().command("ping")
            self._check_fields()
        except (self._pymongo.errors.PyMongoError, ValueError) as error:  # ValueError: of a URL that is none
            if self.may_pass(error):
                raise
            got = f"{self.url or repr(self._given)}: {first_line(error)}"
            raise DataError(Problem(got, "a server that answers"), where="ff.mongo") from error

    def _check_arguments(self) -> None:
        problems = [
            Problem(f"pipeline with {name}", "stages that only read")
            for stage in self._pipeline
            for name in stage
            if name in WRITING_STAGES
        ]
        if problems:
            raise DataError(problems, where="ff.mongo")

    def _check_fields(self) -> None:
        """Raise DataError for fields that no document has."""

        def first(match: Mapping[str, Any]) -> Mapping[str, Any]:
            stages = [*self._pipeline, {"$match": match}, {"$limit": 1}]
            return next(iter(self._database()[self._collection].aggregate(stages)), {})

        if known := list(first({})):
            missing = [name for name in self.columns[1:] if name not in first({name: {"$exists": True}})]
            if problems := argument_checks.unknown_name_problems("field", missing, known):
                raise DataError(problems, where="ff.mongo")

    def scan(self) -> Generator[Row, None, None]:
        documents = self._aggregate([*self._pipeline, {"$sort": {self._key: 1}}], allowDiskUse=True)
        for document in documents:
            yield self._rows([document])[0]

    def rows(self, keys: Sequence[Any]) -> Generator[Row, None, None]:
        wanted = [each for key in keys for each in self._as_stored(key)]
        documents = iter(self._aggregate([*self._pipeline, {"$match": {self._key: {"$in": wanted}}}]))
        while some := list(itertools.islice(documents, ROWS_TOGETHER)):
            yield from self._rows(some)

    def may_pass(self, error: Exception) -> bool:
        return isinstance(error, self._pymongo.errors.ConnectionFailure)

    def _aggregate(self, stages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        shown = {"$project": dict.fromkeys(["_id", *self.columns], 1)}
        return self._database()[self._collection].aggregate([*stages, shown], **options)

    def _as_stored(self, key: Any) -> list[Any]:
        """What a key may be in the collection: object ids are text in the index."""
        is_id = isinstance(key, str) and OBJECT_ID.fullmatch(key)
        return [key, self._object_id(key)] if is_id else [key]

    def _rows(self, documents: Sequence[Mapping[str, Any]]) -> list[Row]:
        ids = [document[name] for document in documents for name in self.columns[1:] if self._is_file(document, name)]
        contents, rows = self._read_files(ids) if ids else {}, []
        for document in documents:
            key = document.get(self._key)
            values: list[Any] = [key if isinstance(key, int | str | None) else str(key)]
            for name in self.columns[1:]:
                value = document.get(name)
                values.append(contents.get(value) if self._is_file(document, name) else value)
            rows.append(tuple(values))
        return rows

    def _is_file(self, document: Mapping[str, Any], name: str) -> bool:
        return isinstance(document.get(name), self._object_id)

    def _read_files(self, ids: Sequence[Any]) -> dict[Any, bytes]:
        """The contents of GridFS files, in one query."""
        parts, num_bytes = dict[Any, list[bytes]](), 0
        chunks = self._database()["fs.chunks"].find({"files_id": {"$in": list(ids)}}).sort([("files_id", 1), ("n", 1)])
        for chunk in chunks:
            num_bytes += len(chunk["data"])
            check_batch_fits(num_bytes, f"{len(ids)} files of GridFS", self.url)
            parts.setdefault(chunk["files_id"], []).append(bytes(chunk["data"]))
        return {each: b"".join(content) for each, content in parts.items()}

    def _database(self) -> Any:
        return self.connections.get(self._connect).get_default_database(default=None)

    def _connect(self) -> Any:
        return self._pymongo.MongoClient(self._given, serverSelectionTimeoutMS=TIMEOUT_MS, connectTimeoutMS=TIMEOUT_MS)
