import math

import numpy as np
import pytest

from alpa_meta.trainer.trigram import trigram_counts, trigram_loss


def test_counts_are_those_of_a_loop():
    part = np.frombuffer(b"abcabcabd", dtype=np.uint8)
    counts = trigram_counts(part)
    a, b, c, d = b"abcd"
    assert counts[a, b, c] == 2
    assert counts[a, b, d] == 1
    assert counts[b, c, a] == 2
    assert counts.sum() == len(part) - 2


def test_the_loss_is_add_one_smoothing_by_hand():
    counts = trigram_counts(np.frombuffer(b"abcabcabd", dtype=np.uint8))
    part = np.frombuffer(b"xabc", dtype=np.uint8)
    # p(c | a b) = (2 + 1) / (3 + 256): after "ab" came c twice and d once
    expected = -math.log(3 / 259)
    assert trigram_loss(counts, part, np.array([2]), 1) == pytest.approx(expected)


def test_an_unseen_pair_has_the_uniform_loss():
    counts = trigram_counts(np.frombuffer(b"aaa", dtype=np.uint8))
    part = np.frombuffer(b"xyz", dtype=np.uint8)
    assert trigram_loss(counts, part, np.array([1]), 1) == pytest.approx(math.log(256))
