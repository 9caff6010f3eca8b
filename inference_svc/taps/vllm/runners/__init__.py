"""What is attached to vLLM's model runners: adapters that read a step's rows, and workarounds on a CPU.

Each module relies on names and behaviour of vLLM that no public interface promises. Its docstring has them, and its
`attach` refuses a vLLM that lacks a name.
"""
