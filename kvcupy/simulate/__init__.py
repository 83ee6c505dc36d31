"""Decode workloads, simulated: seeded, pure, nothing printed.

trace: recorded requests and their readers. workload: synthetic requests.
models, gpus: public models and data sheets by name. timing: seconds from them.
machine: pages and time, what the engine drives. engine: continuous batching over a trace.
fragmentation: what contiguous and paged allocation waste under the same churn.
"""
