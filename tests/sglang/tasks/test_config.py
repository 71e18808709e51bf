"""What is told from a model's files, and made of a head's values, without an engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from openengine.v1 import tasks_pb2
from tests.support.tasks.asking import close, sigmoid, softmax

LOGITS = tasks_pb2.TASK_VALUE_SEMANTICS_LOGITS
PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_PROBABILITIES
LOG_PROBABILITIES = tasks_pb2.TASK_VALUE_SEMANTICS_LOG_PROBABILITIES


@pytest.mark.parametrize(
    ("wanted", "architecture", "otherwise"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "BertModel", True),
        ({"pooling_mode_cls_token": True}, "BertModel", False),
        ({"pooling_mode_cls_token": True}, "LlamaForCausalLM", True),
        ({"pooling_mode_lasttoken": True}, "LlamaForCausalLM", False),
        (None, "BertModel", False),
    ],
)
def test_another_pooling_is_noticed(
    wanted: dict[str, bool] | None, architecture: str, otherwise: bool, tmp_path: Path
) -> None:
    from openengine_adapters.sglang.task_config import pools_otherwise

    if wanted is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(wanted), encoding="utf-8")
    assert pools_otherwise(tmp_path, [architecture]) is otherwise


def test_values_of_every_head() -> None:
    """CLS-02: the largest logits, too."""
    from openengine_adapters.sglang.task_config import Head
    from openengine_adapters.sglang.tasks import meant

    for logits in ([0.5, -1.0, 3.0], [900.0, -900.0, 0.0]):
        assert meant(logits, Head.SOFTMAX, LOGITS) == logits
        assert close(meant(logits, Head.SOFTMAX, PROBABILITIES), softmax(logits))
        assert math.isclose(math.fsum(meant(logits, Head.SOFTMAX, PROBABILITIES)), 1)
    assert close(meant([-2.0, 2.0], Head.SIGMOID, PROBABILITIES), [sigmoid(-2.0), sigmoid(2.0)])
    assert close(meant([-2.0], Head.SIGMOID, LOG_PROBABILITIES), [math.log(sigmoid(-2.0))])
    assert meant([-900.0, 900.0], Head.SIGMOID, LOG_PROBABILITIES) == [-900.0, 0.0]
    assert meant([0.25], Head.PROBABILITIES, PROBABILITIES) == [0.25]
    assert close(meant([0.25, 0.0], Head.PROBABILITIES, LOG_PROBABILITIES)[:1], [math.log(0.25)])
