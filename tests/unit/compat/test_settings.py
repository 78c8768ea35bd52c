"""Torch's settings, read once."""

import pytest
import torch._functorch.config as settings

from lightning_zero.compat.settings import ReadOnce


def test_a_setting_is_what_it_was_when_it_was_read_first() -> None:
    once = ReadOnce(settings)
    with settings.patch(max_dist_from_bw=7, recompute_views=True):
        assert once.max_dist_from_bw == 7
    with settings.patch(max_dist_from_bw=8, recompute_views=False):
        assert (once.max_dist_from_bw, once.recompute_views) == (7, False)
        assert ReadOnce(settings).max_dist_from_bw == 8


def test_what_is_no_setting_is_missed_as_ever() -> None:
    with pytest.raises(AttributeError):
        _ = ReadOnce(settings).nothing_of_the_kind
