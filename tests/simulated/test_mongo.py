"""Laws of MongoDB sources, on mongomock: no server of MongoDB can be had where these tests run."""

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.feed import unpacked
from fourfold.feed.feed import Feed
from fourfold.feed.rows.mongo import MongoDatabase, mongo
from fourfold.feed.staging.origin import Backoff
from fourfold.words.errors import DamagedSample, DataError

mongomock = pytest.importorskip("mongomock")
pymongo = pytest.importorskip("pymongo")
URL = "mongodb://me:secret@host/name"


@pytest.fixture
def database(monkeypatch: Any) -> Any:
    """The database that every client of the test finds at the URL."""
    store = mongomock.store.ServerStore()

    def connect(*_: Any, **options: Any) -> Any:
        client = mongomock.MongoClient("mongodb://host/name", _store=store)
        monkeypatch.setattr(mongomock.Database, "command", lambda *_: {"ok": 1})
        return client

    monkeypatch.setattr(pymongo, "MongoClient", connect)
    return connect().get_default_database()


def fill(database: Any, count: int = 9) -> list[dict[str, Any]]:
    generator = random.Random(0)
    rows = [{"image": bytes([i] * 6), "label": i, "scores": [i / 2, i / 4]} for i in range(count)]
    generator.shuffle(rows)
    database.samples.insert_many(rows)
    return rows


def test_documents_are_samples_in_the_order_of_their_ids(database):
    rows = fill(database)
    source = mongo(URL, "samples", ["image", "label"], target="label", arrays={"image": ("uint8", (2, 3))})
    assert [source[i][1] for i in range(len(source))] == [row["label"] for row in rows]
    images, labels = source.fetch([4, 1])
    assert images.shape == (2, 2, 3)
    assert images[:, 0, 0].tolist() == labels.tolist() == [rows[4]["label"], rows[1]["label"]]
    assert source.sample_key(0) == f"_id = {str(database.samples.find_one()['_id'])!r}"


def test_an_epoch_of_a_feed_has_every_document_once(database):
    fill(database)
    source = mongo(URL, "samples", ["scores", "label"], key="label")
    seen = [batch["scores"] for batch in Feed(mongo(URL, "samples", ["scores"]), batch_size=4)]
    assert sorted(torch.cat(seen)[:, 0].tolist()) == [i / 2 for i in range(9)]
    np.testing.assert_array_equal(source[3]["scores"], [1.5, 0.75])


def test_a_copy_for_a_worker_reads_the_same_documents(database):
    fill(database)
    source = mongo(URL, "samples", ["label"])
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fetch([3, 1])["label"].tolist() == source.fetch([3, 1])["label"].tolist()


def test_a_pipeline_chooses_documents(database):
    fill(database)
    source = mongo(URL, "samples", ["label"], pipeline=[{"$match": {"label": {"$gte": 6}}}])
    assert sorted(source.fetch([0, 1, 2])["label"].tolist()) == [6, 7, 8]


def test_documents_that_change_or_go_are_named(database):
    rows = fill(database)
    source = mongo(URL, "samples", ["label"])
    database.samples.update_one({"_id": rows[2]["_id"]}, {"$set": {"label": 100}})
    database.samples.delete_one({"_id": rows[3]["_id"]})
    with pytest.raises(DataError, match=f"_id = '{rows[2]['_id']}' cannot be read: its row has changed"):
        source.fetch([1, 2])
    with pytest.raises(DataError, match=f"_id = '{rows[3]['_id']}' cannot be read: its row is gone"):
        source[3]
    assert source[4]["label"] == rows[4]["label"]


def test_files_of_gridfs_take_the_place_of_their_ids_and_few_are_held_at_once(database, monkeypatch):
    from mongomock.gridfs import enable_gridfs_integration

    enable_gridfs_integration()
    import gridfs

    files = gridfs.GridFS(database)
    contents = [bytes([i]) * 300_000 for i in range(12)]
    for content in contents:
        database.samples.insert_one({"image": files.put(content, chunk_size=100_000), "label": content[0]})
    read_files, counts = MongoDatabase._read_files, list[int]()
    monkeypatch.setattr(
        MongoDatabase, "_read_files", lambda self, ids: counts.append(len(ids)) or read_files(self, ids)
    )
    source = mongo(URL, "samples", ["image", "label"], target="label")
    images, labels = source.fetch([2, 0, 1])
    assert images.shape == (3, 300_000)
    assert images[:, -1].tolist() == labels.tolist() == [2, 0, 1]
    assert max(counts) <= 8
    monkeypatch.setattr(unpacked, "share_bytes", lambda: 650_000)
    assert source.fetch([2, 0])[1].tolist() == [2, 0]
    with pytest.raises(DataError, match=r"3 files of GridFS of 700000 bytes, .* need a batch that fits"):
        source.fetch([2, 0, 1])


@pytest.mark.parametrize(("options", "message"), [
    ({"pipeline": [{"$out": "other"}]}, r"pipeline with \$out +need stages that only read"),
    ({"target": "labels"}, "target: no column 'labels'"),
    ({"key": "same"}, "several rows with the key 1"),
    ({"key": "missing"}, "a key that is NULL"),
    ({"pipeline": [{"$match": {"label": 100}}]}, "a query without rows"),
])  # fmt: skip
def test_what_cannot_be_a_source_is_refused_with_the_reason(database, options, message):
    fill(database)
    database.samples.update_many({}, {"$set": {"same": 1}})
    with pytest.raises(DataError, match=message):
        mongo(URL, "samples", ["image", "label"], **options)


def test_a_field_that_a_document_lacks_is_named(database):
    rows = fill(database)
    database.samples.update_one({"_id": rows[4]["_id"]}, {"$unset": {"image": 1}})
    source = mongo(URL, "samples", ["image"])
    with pytest.raises(DamagedSample, match=r"sample _id = '.*' cannot be read: image is missing, or NULL"):
        source[4]


def test_arguments_that_no_document_can_answer_are_refused_at_once(database, monkeypatch):
    fill(database)
    with pytest.raises(DataError, match=r"in ff\.mongo\n  no field 'Image' +need one of .*image.* try image"):
        mongo(URL, "samples", ["Image", "label"])
    with pytest.raises(DataError, match=r"no field 'scores\.0'"):
        mongo(URL, "samples", ["scores.0"])
    wrong: Any = {"url": None, "collection": 1, "fields": "image", "key": 2, "target": 3, "arrays": ["image"]}
    with pytest.raises(DataError, match=r"6 problems in ff\.mongo"):
        mongo(**wrong)
    monkeypatch.undo()
    for url in ("mongodb://[", "mongodb://me:secret@host:99999999/name", ""):
        with pytest.raises(DataError, match=r"1 problem in ff\.mongo") as found:
            mongo(url, "samples", ["image"])
        assert "secret" not in str(found.value)


def test_a_server_that_is_away_when_a_source_is_opened_is_waited_for(database, monkeypatch):
    fill(database)
    failures, command = [1], mongomock.Database.command

    def fail(self: Any, *words: Any) -> Any:
        if failures:
            failures.pop()
            raise pymongo.errors.ServerSelectionTimeoutError("connection refused")
        return command(self, *words)

    connect = pymongo.MongoClient

    def connect_and_fail(*words: Any, **options: Any) -> Any:
        client = connect(*words, **options)
        monkeypatch.setattr(mongomock.Database, "command", fail)
        return client

    monkeypatch.setattr(pymongo, "MongoClient", connect_and_fail)
    assert len(mongo(URL, "samples", ["label"])) == 9


def test_a_server_that_goes_away_is_waited_for_and_its_password_is_not_shown(database, monkeypatch, caplog):
    fill(database)
    source = mongo(URL, "samples", ["label"])
    source._backoff = Backoff(first=0.001, longest=0.01, give_up=0.05)
    rows, failures = MongoDatabase.rows, [1, 1]

    def fail(self: Any, keys: Any) -> Any:
        if failures:
            failures.pop()
            raise pymongo.errors.AutoReconnect("connection closed")
        return rows(self, keys)

    monkeypatch.setattr(MongoDatabase, "rows", fail)
    assert "label" in source[0]
    assert len([each for each in caplog.messages if "again in" in each]) == 2
    failures.extend([1] * 100)
    with pytest.raises(DataError, match="need an origin that can be reached") as found:
        source[0]
    assert "secret" not in str(found.value) + caplog.text
