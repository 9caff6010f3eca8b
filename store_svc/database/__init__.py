"""The database, and the keys in it.

* A key is (capture number, sequence, site, first layer, last layer, first position), big-endian, so keys sort as
  numbers. Stored chunks never overlap, so keys are unique. A reader of one layer skips the groups that do not have it.
* A value is a whole `Chunk` as it came over the wire. The payload is the message's last field, so rows are cut where
  they are stored.
* Chunks may be spread over several files, so that threads write them at the same time; see `shards`.
* While a capture is open, its rows follow only from its stored chunks. The store reads their headers when it starts.
  Nothing else is written that could contradict them.
* When a capture ends, the same transaction writes its whole manifest. From then on the store reads only the manifest,
  so a start does not look at the capture's chunks.
* Appends stop before the map is full, so captures can still be ended and deleted.
"""
