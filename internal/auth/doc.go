// Package auth decides who is calling: the key, secret or token of a request against the tenants directory.
//
// It answers from memory. An API key, a channel secret and an operator token are looked up by their hash; a client token
// is checked by its signature and shape, and what it names is looked up then. A credential of the right form that the
// directory does not know may be newer than the directory: [Authenticator] says so (ErrUnknown), and the caller decides
// whether one early poll is worth it.
//
// Client tokens are HS256 JWTs. The algorithm is fixed here and never read from the token; the signing key is derived
// from SECRET_KEY_BASE for this one purpose ([DeriveKey]), so that no other text signed with the same secret passes as a
// token; retired secrets go on verifying until they are taken out of the configuration.
//
// It may import tenants, secrets, fault and postgres; golang-jwt is imported here only. It owns no goroutine
// ([Usage.Run] is the program's to run) and keeps no state beside the directory's but [Usage]. On failure every method returns one of the Err sentinels; none of them tells a caller
// more than that its own credential is unknown, expired, revoked, or belongs to something that is switched off.
//
// Tests pass the time in and need no database: the directory is an interface.
package auth
