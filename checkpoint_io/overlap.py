"""Boxes of elements in a tensor: which part of a saved chunk a wanted chunk needs, and what is still missing.

A checkpoint is read at any world size, mesh or placement by intersecting what was saved with what is wanted, one pair
of boxes at a time. Subtracting what was found from what is wanted says exactly whether every element was saved, even
if saved chunks overlap each other. Everything here is integers: no tensor is touched.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Elements `offsets[d] <= i[d] < offsets[d] + sizes[d]` for every dimension d. A scalar is Box((), ())."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.sizes)


def intersection(one: Box, other: Box) -> Box | None:
    """The elements that are in both; None if there are none."""
    if one == other:
        return one if one.volume else None
    offsets: list[int] = []
    sizes: list[int] = []
    for begin, size, other_begin, other_size in zip(*one, *other, strict=True):
        first = max(begin, other_begin)
        count = min(begin + size, other_begin + other_size) - first
        if count <= 0:
            return None
        offsets.append(first)
        sizes.append(count)
    return Box(tuple(offsets), tuple(sizes))


def without(box: Box, hole: Box) -> list[Box]:
    """`box` less `hole`, which lies in it, as boxes that do not overlap: at most two for each dimension."""
    if box == hole:
        return []
    rest: list[Box] = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (begin, count) in enumerate(zip(*hole, strict=True)):
        before = begin - offsets[dim]
        after = sizes[dim] - before - count
        for first, some in ((offsets[dim], before), (begin + count, after)):
            if some:
                rest.append(Box((*offsets[:dim], first, *offsets[dim + 1 :]), (*sizes[:dim], some, *sizes[dim + 1 :])))
        # What is left to divide agrees with the hole in this dimension.
        offsets[dim], sizes[dim] = begin, count
    return rest


def subtract(wanted: Sequence[Box], found: Box) -> list[Box]:
    """What is still missing of `wanted` when `found` is there."""
    rest: list[Box] = []
    for box in wanted:
        if box == found:
            continue
        common = intersection(box, found)
        rest.extend([box] if common is None else without(box, common))
    return rest


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous row-major array, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def span(part: Box, whole: Box) -> tuple[int, int]:
    """First element and end of `part`, which is not empty, in the row-major array that holds `whole`.

    `part` is one run in that array if and only if the span is as long as its volume.
    """
    if part == whole:
        return 0, whole.volume
    first = last = 0
    for begin, size, base, stride in zip(*part, whole.offsets, strides_of(whole.sizes), strict=True):
        first += (begin - base) * stride
        last += (begin - base + size - 1) * stride
    return first, last + 1
