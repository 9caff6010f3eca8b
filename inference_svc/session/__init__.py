"""A request while it runs: its reservation, its capture session, its generation, and changes of its steering.

*Changes of the steering.* `UpdateSteering` reaches every worker by one `collective_rpc`, between two steps. Each worker
keeps, for each request, which operations apply from which position (`RequestState` in taps/steps/layout.py):

    position    0 ------------ 5 ----- 9 ----->        changed at 5 and at 9; the next position is 12
    operations  first          second  third

* A change applies from the first position that is not computed yet. Only the worker knows that position. Its answer
  goes to the client and into the manifest, for each sequence.
* A position that is computed again after a preemption gets the operations that it had the first time, because captured
  rows and later rows depend on them. So a request keeps the bank rows of all vectors that it has used. A request that
  was never changed pays one comparison per step.
* A change may reach a worker before its request does. The worker keeps the change under the request's name until the
  request is scheduled, or until it is told to forget it. It remembers the names of ended requests.
* Changes of one request are sent one after the other. A change whose caller leaves before it is sent is not sent; once
  it is sent, it is recorded whatever happens to the caller or the request.
* The end of a request waits up to 5 s for the engine's answer to a change. If a step takes longer, it waits for the
  store, and the change applies after everything that is computed for the request.
* All operations that a request has had must fit the taps' tables and the manifest together, because a step that
  computes the request again may need all of them. Otherwise the change is refused (LIMIT_REACHED).
"""
