"""What a model and a run cost: operations, time, traffic.

Rooms:
    flops       FlopsProfiler and get_model_profile: operations, products, parameters and time of each module
    formulas    what an operation multiplies, where torch's counter does not know it or is wrong
    spans       which module an operation belongs to, forward and backward
    table       a profile as text
    modes       dispatch modes that end in any order
    throughput  tokens, samples and operations a second, and the share of the device's peak, by phase
    phases      the time of each phase of a step, which monitor keeps too
    comms       CommsLogger: how often, how much and how fast ranks talk
    collectives which operations talk, to whom, how many bytes
    latencies   running sums and histograms by operation and size, in bounded memory
"""
