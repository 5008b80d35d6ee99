from __future__ import annotations

from collections.abc import Iterator

import pytest

from boxcov.error_model import training


@pytest.fixture(scope="module", autouse=True)
def few_epochs() -> Iterator[None]:
    """Error models of two epochs: their quality is tested in tests/error_model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "EPOCHS", 2)
        yield
