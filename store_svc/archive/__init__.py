"""The archive: object storage to which ended captures are copied, and from which the store can read them.

`objects` is the only module that uses obstore. `layout` has the names and the contents of objects, `records` what the
database knows about them. `copying` writes captures to the archive, `fetching` reads them, `archive` runs both.
`workers` are their threads. `restore` makes a database from an archive.
"""
