"""Launches on several streams at once, by several threads, and in graphs."""

import threading

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


def assert_graphs_and_threads_give(run, tensors, expected):
    """These bits, by a graph of three launches, and by four threads with streams of their own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run(*tensors) for _ in range(3)]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in captured)
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if not torch.equal(run(*tensors), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not wrong
