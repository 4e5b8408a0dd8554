// Package secrets keeps secrets from being seen: in logs and errors ([Text]), in the database ([Box], [Hash]) and in
// audit records ([Redact]).
//
// It decides how a secret is printed (never), how it is sealed at rest (AES-256-GCM, bound to the row and column it
// stands in) and which member names are taken for secrets. It is a leaf: the standard library and the UUID type only.
//
// It owns no goroutines. On failure: a sealed value that does not open is an error that says no more than which of two
// reasons it was; a broken source of randomness ends the program, as everywhere in Go's standard library.
//
// Tests need nothing but the package; [Box.Open] and [Redact] have fuzz targets.
package secrets
