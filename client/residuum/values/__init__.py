"""Plain values that users pass in and get back. They hold no connection and no thread.

A request consists of `selections`, `tensors`, `steering`, `probes` and the `Capture` of `captures`. The rest of
`captures`, `replies` and `model` is what the services return. Each room may import those named before it; `replies` and
`model` do not import each other.
"""
