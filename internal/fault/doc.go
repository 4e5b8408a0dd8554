// Package fault is how every package says that the caller's input is wrong: which member, in what way, and in words.
//
// It decides nothing but the shape of such an error, so that one place (internal/http) can turn it into the "errors"
// list of a problem+json answer. It is a leaf: it imports only the standard library, and any package may import it.
//
// It owns no goroutines and cannot fail. Tests are plain table tests.
package fault
