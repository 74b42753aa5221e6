"""What the programs of these tests share."""

import pytest

from tests import warm


def pytest_collection_finish(session: pytest.Session) -> None:
    """The smoke test of another example need not wait for what BERT imports."""
    if any("bert_dp" in item.name for item in session.items):
        warm.ALSO += ["transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert"]
