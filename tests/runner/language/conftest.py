"""What the tests of language models share."""

from __future__ import annotations

import pytest

from tests.runner.language.texts import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small tokenizer."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
