"""The CUDA target of the fusion compiler: schedules, emission through NVRTC, launching."""
