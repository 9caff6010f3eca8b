"""What runs inside vLLM's worker process: which rows, which layers, which vectors; the op; the blocks.

One step of the engine goes through here in this order:

    worker.execute_model        retires finished requests, admits new ones           (worker.py, runtime.py)
    runner adapter              says which rows of the batch belong to which request (runner_v1.py)
    runtime.place               lays the rows out: capture blocks, steering batches  (layout.py, blocks.py)
    op `residuum::tap`          once a layer, inside the graph: steer, then copy     (op.py, cpu.py, operations.py)
    runtime.finish_step         moves full blocks into the shared ring               (blocks.py, sink.py)
"""
