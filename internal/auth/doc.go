// Package auth decides who is calling: the key, secret or token of a request against the tenants directory, or a person's
// session; and it signs people in.
//
// For programs it answers from memory. An API key, a channel secret and an operator token are looked up by their hash; a client token
// is checked by its signature and shape, and what it names is looked up then. A credential of the right form that the
// directory does not know may be newer than the directory: [Authenticator] says so (ErrUnknown), and the caller decides
// whether one early poll is worth it.
//
// Client tokens are HS256 JWTs. The algorithm is fixed here and never read from the token. The program derives a key for this
// one purpose from SECRET_KEY_BASE ([DeriveKey]), and [NewTokens] from that the key that signs, so that no other text signed
// with the same secret passes as a token; retired secrets go on verifying until they are taken out of the configuration.
//
// People are users of two realms, the installation's ([Admins]) and each tenant's ([TenantRealm]); [Users] makes and changes
// them, with a bcrypt hash of their password. [SignIn] opens a session by password or by one-time link: names are brought to
// their canonical form ([tenants.Canonical]), room for the attempt is reserved before anything is looked up, and unknown,
// wrong and switched off look alike and cost the same. [Sessions] reads a session with its user and tenant at each request, so
// what was taken away is gone at once on every node; a token that nobody issued is refused from memory. Browsers keep
// tokens with a keyed mark; the database holds their SHA-256 only.
//
// It may import tenants, ratelimit, secrets, fault and postgres; golang-jwt and bcrypt are imported here only. It owns no
// goroutine ([Usage.Run] and [Refusals.Run] are the program's to run) and keeps no state beside the directory's but theirs. On failure every
// method returns one of the Err sentinels; none of them tells a caller more than that its own credential is unknown,
// expired, revoked, or belongs to something that is switched off. What fails of a sign-in through no fault of the visitor
// (no database, no processor free) does not count against the account.
//
// Tests of tokens and keys pass the time in and need no database: the directory is an interface. Those of users and sessions
// use a real one, and move its times.
package auth
