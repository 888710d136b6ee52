"""Launches on several streams at once."""

import torch


def assert_streams_keep_apart(executable, sets, rounds):
    """Each set of tensors has a stream of its own, again and again; the results are those alone."""
    expected = [executable(*tensors) for tensors in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        for stream, tensors in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                found.append(executable(*tensors))
    torch.cuda.synchronize()
    for k, outs in enumerate(found):
        pairs = zip(outs, expected[k % len(sets)], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
