"""Laws of the file that keeps what a run was predicted to take."""

import pytest

from fourfold.plan.plan import Plan
from fourfold.planner.predict.prediction import (
    PredictionError,
    RecordedPrediction,
    decode_prediction,
    encode_prediction,
)
from tests.decision_cases import BEST, timed


@pytest.mark.parametrize("prediction", [BEST, timed(Plan(pp=4, microbatches=8, stages="1,2,1,2"))])
def test_a_prediction_is_read_as_it_was_written(prediction):
    recorded = RecordedPrediction(prediction, "this machine, measured on 26 November")
    assert decode_prediction(encode_prediction(recorded)) == recorded


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(b'"compute"', b'"computing"'),
        lambda text: text.replace(b"F0.0", b"Q0.0"),
        lambda text: text.replace(b"pp = 4", b"pp = 0"),
        lambda text: b"[]",
    ],
)
def test_a_file_that_is_no_prediction_is_refused(change):
    text = encode_prediction(RecordedPrediction(timed(Plan(pp=4, microbatches=8)), "here"))
    assert change(text) != text
    with pytest.raises(PredictionError, match=r"1 problem in prediction\.json\n  no prediction of a run"):
        decode_prediction(change(text))
