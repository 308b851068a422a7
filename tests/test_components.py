"""The arithmetic under the modules, against a slow loop or a wider dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from transformer_std.components.kernels import masked_scores, mix_fast
from transformer_std.components.positions import causal, visible
from transformer_std.components.rotary import rotary_angles, turn
from transformer_std.config import Rotary


def test_rotary_turns_pairs_and_passes_the_tail() -> None:
    rotary = Rotary(dims=6, theta=100.0, contiguous=True)
    heads = torch.randn(1, 2, 5, 10, dtype=torch.float32)
    turned = turn(heads, rotary_angles(rotary, torch.arange(5)[None], torch.float32), rotary)
    for position in range(5):
        for pair in range(3):
            angle = position / 100.0 ** (2 * pair / 6)
            x, y = heads[0, :, position, pair], heads[0, :, position, pair + 3]
            expected = x * math.cos(angle) - y * math.sin(angle), y * math.cos(angle) + x * math.sin(angle)
            torch.testing.assert_close(turned[0, :, position, pair], expected[0])
            torch.testing.assert_close(turned[0, :, position, pair + 3], expected[1])
    assert torch.equal(turned[..., 6:], heads[..., 6:])


@pytest.mark.parametrize(("queries", "keys", "window"), [(6, 6, None), (6, 6, 3), (2, 6, 3), (1, 6, 4), (6, 6, 1)])
def test_the_last_row_sees_exactly_its_window(queries: int, keys: int, window: int | None) -> None:
    seen = causal(queries, keys, window, torch.device("cpu"))
    for query in range(queries):
        at = keys - queries + query
        assert seen[query].tolist() == [key <= at and (window is None or at - key < window) for key in range(keys)]
    assert int(seen[-1].sum()) == (window or keys)


def test_no_mask_where_none_is_needed() -> None:
    cpu = torch.device("cpu")
    assert visible(None, 5, 5, None, cpu) is None
    assert visible(None, 5, 5, 6, cpu) is None
    assert visible(None, 1, 9, None, cpu) is None
    assert visible(None, 5, 5, 5, cpu) is not None
    assert visible(None, 2, 5, None, cpu) is not None
    padding = torch.tensor([[False, True, True], [True, True, True]])
    mask = visible(padding, 3, 3, None, cpu)
    assert mask is not None
    assert mask[0, 0].tolist() == [[False, False, False], [False, True, False], [False, True, True]]


def heads(seq: int, size: float, dtype: torch.dtype, count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seq + count)
    return (size * torch.randn(2, count, seq, 20, generator=generator)).to(dtype)


@pytest.mark.parametrize("size", [1.0, 50.0, 100.0, 200.0, 600.0])
@pytest.mark.parametrize("window", [None, 3])
def test_float16_scores_stay_finite_past_65504(size: float, window: int | None) -> None:
    q, k = heads(9, size, torch.float16), heads(9, size, torch.float16, 2)
    product = torch.matmul(q.float(), k.float().repeat_interleave(2, 1).transpose(2, 3))
    assert (product.abs().max() > 65504) == (size > 50), "the test is not where it should be"
    mask = visible(None, 9, 9, window, q.device)
    scale = 20**-0.5
    scores = masked_scores(q, k, mask, scale)
    assert scores.isfinite().all()
    expected = masked_scores(q.float(), k.float(), mask, scale).softmax(-1)
    ours = scores.softmax(-1, dtype=torch.float32)
    # Rows past the range come from float32; of the others, those sure by more than a float16 score's last bit.
    sure = (expected.amax(-1) > 0.9999) & ((size < 60) | (scores.amax(-1) == 0))
    assert sure.sum() > (10 if size > 1 else 0)
    torch.testing.assert_close(ours[sure], expected[sure], atol=0.002, rtol=0)
    seen = causal(9, 9, window, q.device)
    assert (scores[..., ~seen] == torch.finfo(torch.float16).min).all()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 2, 7])
@pytest.mark.parametrize("window", [None, 4])
def test_the_fast_path_is_the_open_one(groups: int, queries: int, window: int | None) -> None:
    q, k, v = (
        heads(queries, 1, torch.float32),
        heads(7, 1, torch.float32, 4 // groups),
        heads(7, 2, torch.float32, 4 // groups),
    )
    mask = visible(None, queries, 7, window, q.device)
    fast = mix_fast(q, k, v, mask, 0.3)
    for head in range(4):
        for query in range(queries):
            at = 7 - queries + query
            first = 0 if window is None else max(0, at - window + 1)
            keys = k[:, head // groups, first : at + 1]
            weights = (0.3 * torch.einsum("bd,bkd->bk", q[:, head, query], keys)).softmax(-1)
            expected = torch.einsum("bk,bkd->bd", weights, v[:, head // groups, first : at + 1])
            torch.testing.assert_close(fast[:, query, head], expected)
