"""Triton kernels of attention within segments: forward, and a deterministic backward pass.

FlashAttention 2's algorithm (Dao 2023, arXiv:2307.08691). Its backward pass adds the gradients of
queries in arbitrary order, by atomic additions. Here two kernels divide the work: one owns the
gradient of a block of queries and loops over keys, the other owns those of a block of keys and
values and loops over queries, and over the query heads that share a key head. Both recompute the
scores, so there are seven products instead of five, but every sum has one order.

A program finds its block from the bounds on the device, so one grid serves every division of a row
into as many segments: block b of segment s has number start_s // size + s + b, which is unique
across segments. The few unused numbers return at once.

Scores are kept in units of log 2, because GPUs compute powers of two.

Shape letters: H query heads, K heads of keys and values, M tokens of the flat row, S segments, D
width of queries and keys, E width of values.
"""

# ruff: noqa: ANN001, ANN201, ANN202 - Triton itself finds the types of a kernel's parameters

from __future__ import annotations

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # torch for CPUs comes without it
    triton = None

# Arguments that change between micro-batches. Triton would compile a kernel again for 1, and for
# multiples of 16.
_CHANGING = ("num_segments", "num_tokens", "window")

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _find_block(  # type: ignore[no-untyped-def, unused-ignore]
        bounds, num_segments, number, size: tl.constexpr, at_once: tl.constexpr
    ):
        """Return the first token of a block's segment, its length, and the block's place in it."""
        before = 0
        for first in range(0, num_segments, at_once):
            place = first + tl.arange(0, at_once)
            inside = place < num_segments
            bound = tl.load(bounds + place, mask=inside, other=0)
            before += tl.sum((inside & (bound // size + place <= number)).to(tl.int32), 0)
        start = tl.load(bounds + before - 1)
        length = tl.load(bounds + before) - start
        return start, length, (number - (start // size + before - 1)) * size

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _load_rows(  # type: ignore[no-untyped-def, unused-ignore]
        base, token, stride, length, width: tl.constexpr, padded: tl.constexpr,
        masked: tl.constexpr,
    ):  # fmt: skip
        """Return a tile (tokens, padded width); zeros beyond the segment and beyond the width."""
        place = tl.arange(0, padded)
        pointers = base + token.to(tl.int64)[:, None] * stride + place[None, :]
        if masked:
            inside = (token < length)[:, None]
            if width != padded:
                inside = inside & (place < width)[None, :]
            return tl.load(pointers, mask=inside, other=0.0)
        if width != padded:
            return tl.load(pointers, mask=(place < width)[None, :], other=0.0)
        return tl.load(pointers)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _store_rows(  # type: ignore[no-untyped-def, unused-ignore]
        base, token, stride, length, tile, width: tl.constexpr, padded: tl.constexpr
    ):
        place = tl.arange(0, padded)
        pointers = base + token.to(tl.int64)[:, None] * stride + place[None, :]
        inside = (token < length)[:, None] & (place < width)[None, :]
        tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _cap(scores, inner, has_cap: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
        """Return tanh(inner * scores) with a cap, else the scores."""
        if has_cap:  # 2.88... is 2 * log2(e)
            return 1.0 - 2.0 / (tl.exp2(scores * (inner * 2.885390081777927)) + 1.0)
        return scores

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _allows(  # type: ignore[no-untyped-def, unused-ignore]
        query_token, key_token, window, has_window: tl.constexpr
    ):
        allowed = key_token <= query_token
        if has_window:
            allowed = allowed & (query_token - key_token < window)
        return allowed

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _find_keys(  # type: ignore[no-untyped-def, unused-ignore]
        first, length, window, has_window: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr
    ):
        """Return the bounds of the keys of a block of queries: all, and those without a mask."""
        begin, plain_begin = 0, 0
        plain_end = first // columns * columns
        if has_window:
            begin = tl.maximum(first - window + 1, 0) // columns * columns
            plain_begin = tl.cdiv(tl.maximum(first + rows - window, 0), columns) * columns
            plain_begin = tl.minimum(tl.maximum(plain_begin, begin), plain_end)
        return begin, plain_begin, plain_end, tl.minimum(first + rows, length)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _attend_keys(  # type: ignore[no-untyped-def, unused-ignore]
        state, total, most, query, key, value, token, begin, end, length, window, inner, outer,
        key_stride, value_stride,
        has_window: tl.constexpr, has_cap: tl.constexpr, masked: tl.constexpr,
        width: tl.constexpr, value_width: tl.constexpr,
        padded: tl.constexpr, value_padded: tl.constexpr, columns: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, columns):
            other = first + tl.arange(0, columns)
            keys = _load_rows(key, other, key_stride, length, width, padded, masked)
            values = _load_rows(
                value, other, value_stride, length, value_width, value_padded, masked
            )
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
            scores = _cap(scores, inner, has_cap) * outer
            if masked:
                allowed = _allows(token[:, None], other[None, :], window, has_window)
                scores = tl.where(allowed, scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fading = tl.exp2(most - higher)
            total = total * fading + tl.sum(weights, 1)
            state = state * fading[:, None]
            state = tl.dot(weights.to(values.dtype), values, state, input_precision="ieee")
            most = higher
        return state, total, most

    @triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator, unused-ignore]
    def forward_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        query, key, value, sinks, bounds, out, lse, num_segments, num_tokens, window, inner, outer,
        query_stride, query_head, key_stride, key_head, value_stride, value_head,
        group: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr,
        has_sinks: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr,
        padded: tl.constexpr, value_padded: tl.constexpr,
        rows: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
    ):  # fmt: skip
        # The last blocks of a segment have the most keys, so they start first.
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        head, num_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
        start, length, first = _find_block(bounds, num_segments, number, rows, at_once)
        if first >= length:
            return
        token = first + tl.arange(0, rows)
        start = start.to(tl.int64)
        query += start * query_stride + head * query_head
        key += start * key_stride + head // group * key_head
        value += start * value_stride + head // group * value_head
        queries = _load_rows(query, token, query_stride, length, width, padded, True)
        # Finite, so that rows whose first keys are all masked produce no NaN.
        least, begun = -1e30, 0.0
        if has_sinks:
            # A sink is one more score, of a key without value. 1.44... is log2(e).
            least, begun = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, 1.0
        most = tl.zeros((rows,), tl.float32) + least
        total = tl.zeros((rows,), tl.float32) + begun
        state = tl.zeros((rows, value_padded), tl.float32)
        begin, plain_begin, plain_end, end = _find_keys(
            first, length, window, has_window, rows, columns
        )
        if has_window:
            state, total, most = _attend_keys(
                state, total, most, queries, key, value, token, begin, plain_begin, length, window,
                inner, outer, key_stride, value_stride, has_window, has_cap, True,
                width, value_width, padded, value_padded, columns,
            )  # fmt: skip
        state, total, most = _attend_keys(
            state, total, most, queries, key, value, token, plain_begin, plain_end, length, window,
            inner, outer, key_stride, value_stride, has_window, has_cap, False,
            width, value_width, padded, value_padded, columns,
        )  # fmt: skip
        state, total, most = _attend_keys(
            state, total, most, queries, key, value, token, plain_end, end, length, window,
            inner, outer, key_stride, value_stride, has_window, has_cap, True,
            width, value_width, padded, value_padded, columns,
        )  # fmt: skip
        out += (start * num_heads + head) * value_width
        _store_rows(
            out, token, num_heads * value_width, length, state / total[:, None],
            value_width, value_padded,
        )  # fmt: skip
        lse += head * num_tokens + start
        tl.store(lse + token, most + tl.log2(total), mask=token < length)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _weigh(  # type: ignore[no-untyped-def, unused-ignore]
        scores, lse, inner, outer, has_cap: tl.constexpr
    ):
        """Return the weights of scores, and the derivative of the scores by the products."""
        scores = _cap(scores, inner, has_cap)
        weights = tl.exp2(scores * outer - lse)
        slope = 1.0 - scores * scores if has_cap else 1.0
        return weights, slope

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _differentiate_queries(  # type: ignore[no-untyped-def, unused-ignore]
        found, query, gradient, key, value, lse, delta, token, begin, end, length, window,
        inner, outer, key_stride, value_stride,
        has_window: tl.constexpr, has_cap: tl.constexpr, masked: tl.constexpr,
        width: tl.constexpr, value_width: tl.constexpr,
        padded: tl.constexpr, value_padded: tl.constexpr, columns: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, columns):
            other = first + tl.arange(0, columns)
            keys = _load_rows(key, other, key_stride, length, width, padded, masked)
            values = _load_rows(
                value, other, value_stride, length, value_width, value_padded, masked
            )
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
            weights, slope = _weigh(scores, lse[:, None], inner, outer, has_cap)
            if masked:
                allowed = _allows(token[:, None], other[None, :], window, has_window)
                weights = tl.where(allowed, weights, 0.0)
            of_weights = tl.dot(gradient, tl.trans(values), input_precision="ieee")
            of_scores = weights * (of_weights - delta[:, None]) * slope
            found = tl.dot(of_scores.to(keys.dtype), keys, found, input_precision="ieee")
        return found

    @triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator, unused-ignore]
    def queries_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        gradient, query, key, value, out, lse, bounds, of_query, delta,
        num_segments, num_tokens, window, inner, outer, scale,
        query_stride, query_head, key_stride, key_head, value_stride, value_head,
        group: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr,
        width: tl.constexpr, value_width: tl.constexpr,
        padded: tl.constexpr, value_padded: tl.constexpr,
        rows: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
    ):  # fmt: skip
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        head, num_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
        start, length, first = _find_block(bounds, num_segments, number, rows, at_once)
        if first >= length:
            return
        token = first + tl.arange(0, rows)
        start = start.to(tl.int64)
        query += start * query_stride + head * query_head
        key += start * key_stride + head // group * key_head
        value += start * value_stride + head // group * value_head
        out_stride = num_heads * value_width
        gradient += (start * num_heads + head) * value_width
        out += (start * num_heads + head) * value_width
        queries = _load_rows(query, token, query_stride, length, width, padded, True)
        gradients = _load_rows(gradient, token, out_stride, length, value_width, value_padded, True)
        outs = _load_rows(out, token, out_stride, length, value_width, value_padded, True)
        deltas = tl.sum(gradients.to(tl.float32) * outs.to(tl.float32), 1)
        sums = tl.load(lse + head * num_tokens + start + token, mask=token < length, other=0.0)
        tl.store(delta + head * num_tokens + start + token, deltas, mask=token < length)
        found = tl.zeros((rows, padded), tl.float32)
        begin, plain_begin, plain_end, end = _find_keys(
            first, length, window, has_window, rows, columns
        )
        if has_window:
            found = _differentiate_queries(
                found, queries, gradients, key, value, sums, deltas, token, begin, plain_begin,
                length, window, inner, outer, key_stride, value_stride, has_window, has_cap, True,
                width, value_width, padded, value_padded, columns,
            )  # fmt: skip
        found = _differentiate_queries(
            found, queries, gradients, key, value, sums, deltas, token, plain_begin, plain_end,
            length, window, inner, outer, key_stride, value_stride, has_window, has_cap, False,
            width, value_width, padded, value_padded, columns,
        )  # fmt: skip
        found = _differentiate_queries(
            found, queries, gradients, key, value, sums, deltas, token, plain_end, end,
            length, window, inner, outer, key_stride, value_stride, has_window, has_cap, True,
            width, value_width, padded, value_padded, columns,
        )  # fmt: skip
        of_query += (start * num_heads + head) * width
        _store_rows(of_query, token, num_heads * width, length, found * scale, width, padded)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _differentiate_keys(  # type: ignore[no-untyped-def, unused-ignore]
        of_keys, of_values, keys, values, query, gradient, lse, delta, token, begin, end, length,
        window, inner, outer, query_stride, gradient_stride,
        has_window: tl.constexpr, has_cap: tl.constexpr, masked: tl.constexpr,
        width: tl.constexpr, value_width: tl.constexpr,
        padded: tl.constexpr, value_padded: tl.constexpr, columns: tl.constexpr,
    ):  # fmt: skip
        for first in range(begin, end, columns):
            other = first + tl.arange(0, columns)
            queries = _load_rows(query, other, query_stride, length, width, padded, masked)
            gradients = _load_rows(
                gradient, other, gradient_stride, length, value_width, value_padded, masked
            )
            if masked:
                sums = tl.load(lse + other, mask=other < length, other=0.0)
                deltas = tl.load(delta + other, mask=other < length, other=0.0)
            else:
                sums, deltas = tl.load(lse + other), tl.load(delta + other)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            weights, slope = _weigh(scores, sums[None, :], inner, outer, has_cap)
            if masked:
                allowed = _allows(other[None, :], token[:, None], window, has_window)
                allowed = allowed & (other < length)[None, :]
                weights = tl.where(allowed, weights, 0.0)
            of_values = tl.dot(
                weights.to(gradients.dtype), gradients, of_values, input_precision="ieee"
            )
            of_weights = tl.dot(values, tl.trans(gradients), input_precision="ieee")
            of_scores = weights * (of_weights - deltas[None, :]) * slope
            of_keys = tl.dot(of_scores.to(queries.dtype), queries, of_keys, input_precision="ieee")
        return of_keys, of_values

    @triton.jit(do_not_specialize=_CHANGING)  # type: ignore[untyped-decorator, unused-ignore]
    def keys_kernel(  # type: ignore[no-untyped-def, unused-ignore]
        gradient, query, key, value, lse, delta, bounds, of_key, of_value,
        num_segments, num_tokens, window, inner, outer, scale, num_heads,
        query_stride, query_head, key_stride, key_head, value_stride, value_head,
        group: tl.constexpr, heads: tl.constexpr, has_window: tl.constexpr, has_cap: tl.constexpr,
        width: tl.constexpr, value_width: tl.constexpr,
        padded: tl.constexpr, value_padded: tl.constexpr,
        rows: tl.constexpr, columns: tl.constexpr, at_once: tl.constexpr,
    ):  # fmt: skip
        # The first blocks of a segment are read by the most queries, so they start first.
        part, num_parts = tl.program_id(1).to(tl.int64), tl.num_programs(1)
        start, length, first = _find_block(bounds, num_segments, tl.program_id(0), rows, at_once)
        if first >= length:
            return
        token = first + tl.arange(0, rows)
        start = start.to(tl.int64)
        own = part * heads // group
        key += start * key_stride + own * key_head
        value += start * value_stride + own * value_head
        keys = _load_rows(key, token, key_stride, length, width, padded, True)
        values = _load_rows(value, token, value_stride, length, value_width, value_padded, True)
        of_keys = tl.zeros((rows, padded), tl.float32)
        of_values = tl.zeros((rows, value_padded), tl.float32)
        begin = first // columns * columns
        plain_begin = tl.cdiv(first + rows - 1, columns) * columns
        end = length
        plain_end = length // columns * columns
        if has_window:
            end = tl.minimum(length, first + rows - 1 + window)
            plain_end = tl.minimum(length, first + window) // columns * columns
        plain_end = tl.maximum(plain_end, plain_begin)
        out_stride = num_heads * value_width
        for head in range(part * heads, (part + 1) * heads):
            queries = query + start * query_stride + head * query_head
            gradients = gradient + (start * num_heads + head) * value_width
            sums, deltas = lse + head * num_tokens + start, delta + head * num_tokens + start
            of_keys, of_values = _differentiate_keys(
                of_keys, of_values, keys, values, queries, gradients, sums, deltas, token,
                begin, tl.minimum(plain_begin, end), length, window, inner, outer,
                query_stride, out_stride, has_window, has_cap, True,
                width, value_width, padded, value_padded, columns,
            )  # fmt: skip
            of_keys, of_values = _differentiate_keys(
                of_keys, of_values, keys, values, queries, gradients, sums, deltas, token,
                plain_begin, plain_end, length, window, inner, outer,
                query_stride, out_stride, has_window, has_cap, False,
                width, value_width, padded, value_padded, columns,
            )  # fmt: skip
            of_keys, of_values = _differentiate_keys(
                of_keys, of_values, keys, values, queries, gradients, sums, deltas, token,
                plain_end, end, length, window, inner, outer,
                query_stride, out_stride, has_window, has_cap, True,
                width, value_width, padded, value_padded, columns,
            )  # fmt: skip
        of_key += (start * num_parts + part) * width
        _store_rows(of_key, token, num_parts * width, length, of_keys * scale, width, padded)
        of_value += (start * num_parts + part) * value_width
        _store_rows(
            of_value, token, num_parts * value_width, length, of_values, value_width, value_padded
        )
