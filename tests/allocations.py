"""How much memory a call takes on a CPU."""

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call):
    """The most that PyTorch has allocated at a time for `call()`, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = call()
    events = profiler.profiler.kineto_results.events()
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    del out
    return most
