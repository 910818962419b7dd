"""Imports without garbage collections."""

import gc

import pytest

from fourfold.environment.fast_imports import collection_paused


def fail_paused() -> None:
    with collection_paused():
        assert not gc.isenabled()
        raise ImportError


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collection_is_paused_for_imports_and_resumes_without_the_imported_objects(is_enabled, monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    if not is_enabled:
        gc.disable()
    try:
        with pytest.raises(ImportError):
            fail_paused()
        assert gc.isenabled() == is_enabled
        assert frozen == [False]
    finally:
        gc.enable()
