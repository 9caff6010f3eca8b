"""The archive: object storage to which ended captures are copied, and from which the store can read them.

`residuum.wire.archive` has the names and the contents of objects, and `residuum.rpc.objects` is the only module that
uses obstore: clients read archives, too. `records` has what the database knows about objects. `copying` writes captures
to the archive, `fetching` reads them, `archive` runs both. `workers` are their threads. `restore` makes a database from
an archive.
"""
