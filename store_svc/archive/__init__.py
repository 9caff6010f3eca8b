"""The archive: object storage to which ended captures are copied, and from which the store can read them.

`residuum.wire.rows.archive` has the names and the contents of objects, and `residuum.rpc.objects` is the only module
that uses obstore: clients read archives, too. `records` has what the database knows about objects. `archive` starts and
stops the threads: those of `copier`, `dropper` and `keeper`, which share what `access` has. `copying` makes the objects
of one capture. `fetching` reads the archive. `workers` are threads for single calls. `restore` makes a database from an
archive.
"""
