"""`attend` against sums written out in plain Python."""

from __future__ import annotations

import math

import pytest

from gpuarena.errors import ArgumentError, ArgumentTypeError, DTypeError, ShapeError

torch = pytest.importorskip("torch")
attention = pytest.importorskip("gpuarena.kv.attention")
attend = attention.attend


def plain(q, keys, values, scale, sees):
    """Attention one query, head and number at a time; `sees(row, head, query, key)` says what is visible."""
    batch, q_heads, n, _ = q.shape
    group = q_heads // keys.shape[1]
    out = torch.zeros(batch, q_heads, n, values.shape[3], dtype=torch.float64)
    for row in range(batch):
        for head in range(q_heads):
            for query in range(n):
                seen = [key for key in range(keys.shape[2]) if sees(row, head, query, key)]
                k, v = keys[row, head // group].double(), values[row, head // group].double()
                scores = [float(q[row, head, query].double() @ k[key]) * scale for key in seen]
                weights = [math.exp(score - max(scores)) for score in scores]
                for key, weight in zip(seen, weights, strict=True):
                    out[row, head, query] += v[key] * weight / sum(weights)
    return out


def tensors(*, batch=2, q_heads=6, kv_heads=2, n=1, tokens=7, dim=4, value_dim=4):
    torch.manual_seed(0)
    return (
        torch.randn(batch, q_heads, n, dim),
        torch.randn(batch, kv_heads, tokens, dim),
        torch.randn(batch, kv_heads, tokens, value_dim),
    )


def close(got, expected):
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("fold", [0, 64])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("case", [{}, {"window": 3}, {"window": 2, "sinks": 1}, {"window": 9}])
def test_against_sums(monkeypatch, n, fold, q_heads, kv_heads, case):
    monkeypatch.setattr(attention, "FOLD_MAX_QUERIES", fold)
    q, k, v = tensors(n=n, q_heads=q_heads, kv_heads=kv_heads, value_dim=5)
    window, sinks = case.get("window", 99), case.get("sinks", 0)

    def sees(row, head, query, key):
        at = 7 - n + query
        return key <= at and (key > at - window or key < sinks)

    close(attend(q, k, v, **case), plain(q, k, v, 0.5, sees))
    close(attend(q, k, v, scale=0.3, **case), plain(q, k, v, 0.3, sees))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_rows_of_different_lengths(n, as_tensor):
    q, k, v = tensors(n=n)
    lengths = [3, 7]
    expected = plain(q, k, v, 0.5, lambda row, head, query, key: key <= lengths[row] - n + query)
    given = torch.tensor(lengths, dtype=torch.int32) if as_tensor else iter(lengths)
    close(attend(q, k, v, lengths=given), expected)


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("fold", [0, 64])
def test_a_mask_hides_more(monkeypatch, n, heads, rows, fold):
    monkeypatch.setattr(attention, "FOLD_MAX_QUERIES", fold)
    q, k, v = tensors(n=n)
    mask = torch.rand(rows, heads, n, 7) < 0.6
    mask[..., 0] = True  # nobody sees nothing

    def sees(row, head, query, key):
        return key <= 7 - n + query and bool(mask[row % rows, head % heads, query, key])

    close(attend(q, k, v, mask=mask), plain(q, k, v, 0.5, sees))


def test_one_query_of_grouped_heads_needs_no_copy_of_keys():
    q, k, v = tensors(tokens=4096)
    seen = []

    def spy(*args, **options):
        seen.append((args[0].shape, args[1].data_ptr(), options.get("enable_gqa", False)))
        return original(*args, **options)

    original = attention.F.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.F, "scaled_dot_product_attention", spy)
        attend(q, k, v)
    assert seen == [((2, 2, 3, 4), k.data_ptr(), False)]


def test_what_lies_behind_a_length_has_no_weight():
    q, k, v = tensors()
    expected = attend(q[:, :, :, :], k[:, :, :4], v[:, :, :4])
    k[:, :, 4:], v[:, :, 4:] = 1e30, -1e30
    torch.testing.assert_close(attend(q, k, v, lengths=[4, 4]), expected)


def test_no_rows():
    q, k, v = tensors(batch=0)
    assert attend(q, k, v).shape == (0, 6, 1, 4)
    assert attend(q, k, v, lengths=[]).shape == (0, 6, 1, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: ((None, k, v), {}), ArgumentTypeError, "q must be a torch.Tensor"),
        (lambda q, k, v: ((q, k[0], v), {}), ShapeError, "keys: four dimensions"),
        (lambda q, k, v: ((q.double(), k, v), {}), DTypeError, "one dtype"),
        (lambda q, k, v: ((q[:1], k, v), {}), ShapeError, "disagree"),
        (lambda q, k, v: ((q[..., :3], k, v), {}), ShapeError, "disagree"),
        (lambda q, k, v: ((q, k, v[:, :, 1:]), {}), ShapeError, "disagree"),
        (lambda q, k, v: ((q[:, :5], k, v), {}), ShapeError, "5 query heads are no multiple of 2"),
        (lambda q, k, v: ((q[:, :, :0], k, v), {}), ShapeError, "0 queries for 7 tokens"),
        (lambda q, k, v: ((q.expand(2, 6, 8, 4), k, v), {}), ShapeError, "8 queries for 7 tokens"),
        (lambda q, k, v: ((q, k, v), {"window": 0}), ArgumentError, "window must be at least 1"),
        (lambda q, k, v: ((q, k, v), {"sinks": 1}), ArgumentError, "sinks belong to a window"),
        (lambda q, k, v: ((q, k, v), {"lengths": [1]}), ShapeError, "for 2 rows"),
        (lambda q, k, v: ((q, k, v), {"lengths": [0, 7]}), ShapeError, "at least its 1 queries"),
        (lambda q, k, v: ((q, k, v), {"lengths": [8, 7]}), ShapeError, "at most 7 tokens"),
        (
            lambda q, k, v: ((q, k, v), {"lengths": [1.0, 7]}),
            ArgumentTypeError,
            "a length must be an integer",
        ),
        (lambda q, k, v: ((q, k, v), {"lengths": torch.ones(2)}), ArgumentTypeError, "must be integers"),
        (
            lambda q, k, v: ((q, k, v), {"mask": [[1]]}),
            ArgumentTypeError,
            "mask must be a tensor of torch.bool",
        ),
        (lambda q, k, v: ((q, k, v), {"mask": torch.zeros(2, 1, 1, 7)}), ArgumentTypeError, "torch.bool"),
        (
            lambda q, k, v: ((q, k, v), {"mask": torch.ones(2, 2, 1, 7, dtype=torch.bool)}),
            ShapeError,
            r"\[2 or 1, 6 or 1, 1, 7\]",
        ),
    ],
)
def test_errors(change, error, message):
    args, options = change(*tensors(n=1))
    with pytest.raises(error, match=message):
        attend(*args, **options)
