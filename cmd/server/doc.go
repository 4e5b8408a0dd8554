// Command server is Converger: the hub, its tools for operators, and the simulators for trying it out.
//
// It decides what the environment means (config.go), which parts a hub is made of and who is given what (hub.go), and in which order they
// start and stop (lifetimes.go). Each command's flags and its Run method stand in the file of its subject; cli.go holds them together.
// Commands are of three kinds: those that work straight on the database, because nobody can call the hub yet or any more (migrate, operator,
// admin, secrets); those that call the management API of a running hub as anybody with a token can (management.go and what uses it);
// and those that try or measure one (dev, simulate, loadtest).
//
// It may import everything; nothing imports it.
//
// Goroutines: those of the parts, each run until the context ends; a part that fails ends the others.
//
// On failure: the message goes to standard error and the exit code says which kind it was (management.go). Secrets get into neither.
//
// Its tests start the program as its users do (run, or a process of its own) against a real Postgres; e2e_test.go walks a newcomer's path.
package main
