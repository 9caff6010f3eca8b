"""`residuum ui`: a page in the browser to explore captures, generate, steer, and keep directions.

A thin Starlette app over `AsyncClient`. It needs the extra `ui`. Everything that the page shows comes from this package
or from the services; it requests nothing from any other host.

    app.py            the routes, and what they share
    access.py         the token, the cookie, and the checks of each request
    answers.py        JSON, server-sent events, and errors as the page reads them
    api/              the calls of the page
      captures.py     lists and manifests
      grids.py        layer × position grids of a measure, and single rows; measures.py computes them,
                      measure_choice.py says which one a request names
      generations.py  generation, with operations.py; changes of steering; stop. sweeps.py: one prompt, several scales
      directions.py   the directions, and searches; gallery.py is their folder, separation.py how well they separate
      health.py       what `residuum doctor` says, the service's load, and the stores' space
    scratch.py        captures that serve only for a direction or a sweep
    static/           the page: ES modules, no build step. scripts/vendor_ui.py checks the libraries in static/vendor
"""
