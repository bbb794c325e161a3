"""Token rows: their digest is the one that feature keys are made of."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftworks.data.tokenized import TokenRow
from draftworks.storage.identity import token_digest


@given(st.lists(st.integers(0, 2**31 - 1)), st.sampled_from([np.int32, np.int64]))
def test_digest_is_that_of_the_ids_whatever_their_type(ids: list[int], dtype: type):
    row = TokenRow("a", np.array(ids, dtype=dtype), np.ones(len(ids), np.bool_))
    assert row.token_digest == token_digest(ids)
