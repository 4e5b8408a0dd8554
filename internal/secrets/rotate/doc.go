// Package rotate seals stored secrets anew under the current key, so that an old key can be taken out of service.
//
// It decides in which order rows are visited and when a value may be replaced: only while it is still, byte for byte, the
// one that was read. That makes it safe beside running nodes and beside itself without a lock: whoever changes the secret
// meanwhile wins, and the value is looked at again. The state of a rotation is the values themselves, each of which names
// its key; a run that was cut off is continued by the next one.
//
// Which columns hold sealed values is told by their owners ([secrets.Column]); it knows no table. It may import secrets
// and postgres.
//
// It owns no goroutines. On failure of the database it stops with the error, and what was renewed stays. A value that does
// not open is left as it is, counted and named; it never stops the rest.
//
// Tests use tables of their own in a real Postgres. That no sealed column is forgotten is tested in cmd/server, which
// joins the owners' lists.
package rotate
