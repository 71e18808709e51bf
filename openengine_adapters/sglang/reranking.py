"""Rerankers that are language models: their chat template asks whether a document answers a query, "yes" or "no".

Recognised and rendered by SGLang's own rerank endpoint, whose answer this is: how likely "yes" is of the two.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.entrypoints.openai import serving_rerank

log = logging.getLogger(__name__)


class Reranker:
    """One model's template, and the ids of its two answers: `labels` are those of "yes" and "no"."""

    def __init__(self, tokenizer: Any) -> None:
        self._template: str = tokenizer.chat_template
        self.labels: list[int] = list(serving_rerank._get_yes_no_token_ids(tokenizer))

    def prompt(self, query: str, candidate: str, instruction: str) -> str:
        """Render a pair; without an instruction the template's own stands. Raises jinja2's errors."""
        rendered = serving_rerank._render_jinja_chat_template(
            self._template, query=query, document=candidate, instruct=instruction or None
        )
        return str(rendered)


def reranker(manager: Any) -> Reranker | None:
    """The reranker that a generating model is; None for other models, and for pairs that hold media."""
    template = getattr(manager.tokenizer, "chat_template", None)
    if not manager.is_generation or not isinstance(template, str):
        return None
    if not serving_rerank._is_qwen3_reranker_template(template):
        return None
    if serving_rerank._is_qwen3_vl_reranker_template(template):
        log.info("no pairs: the chat template of this reranker is for pairs with media, which are not served")
        return None
    return Reranker(manager.tokenizer)
