// Package hub gives the load drivers a hub: the real program as a child process ([Process]), and the calls by which tenants,
// channels and conversations are made on any hub and its metrics are read ([Client]).
//
// It decides with which settings a measured program runs. It imports the standard library only, and speaks HTTP.
//
// Goroutines: a started Process has one that waits for its end. On failure errors hold the end of the program's log.
//
// The tests run the client against a fake hub; a whole Process is run by the drivers' own tests.
package hub
