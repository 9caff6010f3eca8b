"""What runs inside vLLM's worker process: which rows, which layers, which vectors; the op; the blocks.

One step of the engine goes through here in this order:

    worker.execute_model        retires finished requests, admits new ones           (vllm/worker.py, steps/runtime.py)
    runner adapter              says which rows of the batch belong to which request (vllm/runner_v1.py, runner_v2.py)
    runtime.place               gives each row a program and a place in a block      (layout.py and programs.py in
                                steps/, blocks.py)
    op `residuum::tap`          once a layer, inside the graph: steer, then copy     (op.py; on a CPU cpu/tap.py and
                                operations.py, on a GPU tap.py, tables.py and kernel.py in gpu/)
    runtime.finish_step         moves full blocks into the shared ring               (sink.py; gpu/streamed_sink.py)
"""
