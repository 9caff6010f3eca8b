"""The taps: the code inside vLLM's worker process that captures and steers activations.

One step of the engine passes through these parts in this order:

    worker.execute_model        retires finished requests, admits new ones           (vllm/worker.py, steps/runtime.py)
    runner adapter              says which rows of the batch belong to which request (runner_v1.py and runner_v2.py in
                                                                                     vllm/runners/)
    runtime.place               gives each row a program and a place in a block      (layout.py and programs.py in
                                steps/, blocks.py)
    op `residuum::tap`          once a layer, inside the graph: steers and copies    (op.py; on a CPU cpu/tap.py and
                                operations.py, on a GPU tap.py, tables.py and kernels/ in gpu/)
    worker.sample_tokens        with asynchronous scheduling, before `finish_step`   (vllm/worker.py)
    runtime.finish_step         encodes full blocks into the ring                    (sink.py, gpu/streamed_sink.py,
                                gpu/direct_copies.py, followed_captures.py, ring_writer.py)
"""
