"""The arithmetic of boxes, against numpy arrays of marked elements."""

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.checkpoint_io.overlap import Box, intersection, span, strides_of, subtract, without

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], empty: bool = True) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(
        offsets,
        tuple(draw(st.integers(0 if empty else 1, size - begin)) for begin, size in zip(offsets, shape, strict=True)),
    )


def marked(shape: tuple[int, ...], *some: Box) -> "numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]":
    """How many of the boxes each element is in."""
    count = numpy.zeros(shape, numpy.int64)
    for box in some:
        count[tuple(slice(b, b + n) for b, n in zip(*box, strict=True))] += 1
    return count


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_intersection_and_subtraction_are_those_of_sets(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    both = (marked(shape, one) > 0) & (marked(shape, other) > 0)
    common = intersection(one, other)
    assert (common is not None) == bool(both.any())
    if common is not None:
        assert numpy.array_equal(marked(shape, common) == 1, both)
        rest = without(one, common)
        assert len(rest) <= 2 * len(shape)
        # No element twice, none of the hole, none forgotten.
        assert numpy.array_equal(marked(shape, *rest), marked(shape, one) - both)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_missing_after_many_chunks(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    wanted = data.draw(boxes(shape))
    left = [wanted] if wanted.volume else []
    found: list[Box] = []
    for _ in range(data.draw(st.integers(0, 6))):
        found.append(data.draw(boxes(shape)))
        left = subtract(left, found[-1])
    missing = (marked(shape, wanted) > 0) & (marked(shape, *found) == 0)
    assert numpy.array_equal(marked(shape, *left), missing.astype(numpy.int64))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_span_and_strides_are_those_of_a_row_major_array(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    whole = data.draw(boxes(shape, empty=False))
    inner = data.draw(boxes(whole.sizes, empty=False))
    part = Box(tuple(a + b for a, b in zip(inner.offsets, whole.offsets, strict=True)), inner.sizes)
    numbers = numpy.arange(whole.volume).reshape(whole.sizes)
    taken = numbers[tuple(slice(b, b + n) for b, n in zip(*inner, strict=True))]
    first, end = span(part, whole)
    assert (first, end) == (taken.min(), taken.max() + 1)
    run = numpy.array_equal(taken.reshape(-1), numpy.arange(first, first + part.volume))
    assert (end - first == part.volume) == run
    assert strides_of(whole.sizes) == tuple(step // numbers.itemsize for step in numbers.strides) or 1 in whole.sizes


def test_a_scalar_is_one_element() -> None:
    scalar = Box((), ())
    assert scalar.volume == 1
    assert intersection(scalar, scalar) == scalar
    assert without(scalar, scalar) == []
    assert span(scalar, scalar) == (0, 1)
