"""Builds requests to the services and interprets their answers, without I/O. Both clients use it.

`generation` is for calls to the inference service, `captures` for calls to stores. Both build on the modules here.
"""
