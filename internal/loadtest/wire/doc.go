// Package wire is the small HTTP/1.1 of the load drivers: enough for a hub and a driver that know each other, at a
// fraction of net/http's cost, because driver and hub often share the processors.
//
// It decides how requests are written and answers read ([Caller]), and how deliveries are received ([Receiver]). It
// imports the standard library only.
//
// Goroutines: a Receiver owns one for each connection, and ends them with Close. A Caller owns none.
//
// On failure of an exchange the connection is given up and the next request opens another; what became of the request is
// unknown then.
//
// The tests hold both ends against net/http.
package wire
