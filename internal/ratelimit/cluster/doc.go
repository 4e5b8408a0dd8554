// Package cluster holds a limit over the nodes of a cluster without a network hop
// on the path of a request.
package cluster
