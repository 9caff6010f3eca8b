"""Jobs over datasets: prompts from a file go in, and shards of rows with an index come out. A killed job continues.

`inputs` has the prompts, `running` sends them, `results` reads and exports the rows. `job` puts them together.
"""
